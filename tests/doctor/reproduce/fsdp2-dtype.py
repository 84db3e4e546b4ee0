"""Mixed dtypes in one FSDP group."""

# processes: 2

import torch
from small import CURED, join, load, shard, tokens

join()
model = load(dtype=torch.bfloat16)
if not CURED:
    model.model.layers[0].input_layernorm.float()
shard(model)(input_ids=tokens(), labels=tokens()).loss.backward()
