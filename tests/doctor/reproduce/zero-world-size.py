"""Optimizer states that three ranks of ZeRO-2 saved are loaded by another number of ranks."""

# needs: deepspeed
# environment: DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=0

from engine import SAVED, engine

engine(2, SAVED / "z2").load_checkpoint(SAVED / "z2")
