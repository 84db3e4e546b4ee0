"""Tensor-parallel ranks sample different completions."""

# processes: 2

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from small import load, tokens
from transformers.distributed import DistributedConfig

Accelerator(cpu=True)
model = load(distributed_config=DistributedConfig(tp_size=2, tp_plan="auto"))
with torch.no_grad():
    logits = model(input_ids=tokens()).logits[0, -1]
logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits


def sampled():
    """What each rank of the tensor-parallel group takes for the next tokens of one prompt."""
    everywhere = [None, None]
    dist.all_gather_object(everywhere, torch.multinomial(logits.softmax(-1), 16).tolist())
    return everywhere


set_seed(42, device_specific=True)  # as TRL does
first, second = sampled()
assert first != second
set_seed(42)
first, second = sampled()
assert first == second
