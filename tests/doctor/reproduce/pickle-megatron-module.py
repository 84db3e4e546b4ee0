"""A Megatron checkpoint cannot be unpickled without Megatron."""

# needs: torch<2.7

import enum
import sys
from types import ModuleType

import torch

megatron, core, enums = (ModuleType(name) for name in ("megatron", "megatron.core", "megatron.core.enums"))
enums.ModelType = enum.Enum("ModelType", ["encoder_or_decoder"], module="megatron.core.enums")
sys.modules |= {module.__name__: module for module in (megatron, core, enums)}
torch.save({"model_type": enums.ModelType.encoder_or_decoder, "iteration": 100}, "out/model_optim_rng.pt")
for module in (megatron, core, enums):  # another machine has none of it
    del sys.modules[module.__name__]
torch.load("out/model_optim_rng.pt", map_location="cpu", weights_only=False)
