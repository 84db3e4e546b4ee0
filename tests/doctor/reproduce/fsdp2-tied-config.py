"""config.json says tied, the weights say untied."""

# processes: 2

import fsdp_on_cpu  # noqa: F401
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from small import CURED, load

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=True
)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
model = load()
model.config.tie_word_embeddings = not CURED  # its weights are not tied
accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
