"""The layer class to wrap does not exist in this model."""

# processes: 2

import fsdp_on_cpu  # noqa: F401
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from small import CURED, load

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=None if CURED else ["LlamaDecoderLayer"],
)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
model = load()
accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
