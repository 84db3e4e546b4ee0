"""A tensor of the Megatron checkpoint has another global shape."""

from mcore import QWEN2, build, start
from megatron.core import dist_checkpointing
from small import CURED

start()
dist_checkpointing.save({"model": build(QWEN2).sharded_state_dict()}, "out")
model = build(QWEN2 if CURED else {**QWEN2, "kv_channels": 16})
dist_checkpointing.load({"model": model.sharded_state_dict()}, "out")
