"""Tensors that the model does not ask for are left in the Megatron checkpoint."""

import torch
from mcore import start
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor


def whole(name):
    return ShardedTensor.from_rank_offsets(name, torch.ones(32))


start()
state = {"norm": whole("decoder.final_layernorm.weight"), "mtp": whole("mtp.layers.0.enorm.weight")}
dist_checkpointing.save(state, "out")
loaded = dist_checkpointing.load({"norm": whole("decoder.final_layernorm.weight")}, "out")
assert "mtp.layers.0.enorm.weight" in dist_checkpointing.load_tensors_metadata("out")
assert set(loaded) == {"norm"}
