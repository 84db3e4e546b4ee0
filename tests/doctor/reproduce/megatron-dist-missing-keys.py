"""A Megatron checkpoint and the model name different tensors."""

from mcore import QWEN2, QWEN3, build, start
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from small import CURED

start()
dist_checkpointing.save({"model": build(QWEN2).sharded_state_dict()}, "out")
model = build(QWEN2 if CURED else QWEN3)
dist_checkpointing.load({"model": model.sharded_state_dict()}, "out", strict=StrictHandling.RAISE_ALL)
