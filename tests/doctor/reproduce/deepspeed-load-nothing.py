"""DeepSpeed loads no checkpoint and only warns."""

# needs: deepspeed
# environment: DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=0

from engine import engine
from small import MODEL

assert engine(2, MODEL).load_checkpoint("out/none") == (None, None)
