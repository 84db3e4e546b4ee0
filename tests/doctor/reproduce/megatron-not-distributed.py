"""The folder is not a distributed checkpoint of Megatron."""

from mcore import QWEN2, build, start
from megatron.core import dist_checkpointing
from small import CURED

start()
state = {"model": build(QWEN2).sharded_state_dict()}
if CURED:
    dist_checkpointing.save(state, "out")
dist_checkpointing.load(state, "out")
