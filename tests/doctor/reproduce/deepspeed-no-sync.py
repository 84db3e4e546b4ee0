"""Gradient accumulation without synchronization under ZeRO-2 or ZeRO-3."""

# needs: deepspeed
# environment: DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=0

from engine import engine
from small import CURED, MODEL

with engine(1 if CURED else 2, MODEL).no_sync():
    pass
