"""A weight that ZeRO-3 has taken apart is used outside its engine."""

# needs: deepspeed
# environment: DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=0

from contextlib import nullcontext

import deepspeed
from engine import engine
from small import CURED, MODEL, tokens
from torch.nn.functional import embedding

weight = engine(3, MODEL).module.get_input_embeddings().weight
with deepspeed.zero.GatheredParameters([weight]) if CURED else nullcontext():
    embedding(tokens(), weight)
