"""FSDP2 prepares a model without its optimizer."""

# processes: 2

import fsdp_on_cpu  # noqa: F401
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from small import CURED, load, tokens

plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
model = load()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if CURED:
    model, optimizer = accelerator.prepare(model, optimizer)
else:
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(optimizer)
accelerator.backward(model(input_ids=tokens(), labels=tokens()).loss)
optimizer.step()
