"""Megatron's gradient accumulation fusion needs an extension of apex."""

import torch
from mcore import QWEN2, config, start
from megatron.core.tensor_parallel import ColumnParallelLinear
from small import CURED

start()
fused = config(QWEN2)
fused.gradient_accumulation_fusion = not CURED
ColumnParallelLinear(4, 4, config=fused, init_method=torch.nn.init.ones_)
