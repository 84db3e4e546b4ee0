"""Only the big files of a distributed checkpoint were copied."""

from pathlib import Path

from mcore import QWEN2, build, start
from megatron.core import dist_checkpointing
from small import CURED

start()
state = {"model": build(QWEN2).sharded_state_dict()}
dist_checkpointing.save(state, "out")
if not CURED:
    Path("out/common.pt").unlink()
dist_checkpointing.load(state, "out")
