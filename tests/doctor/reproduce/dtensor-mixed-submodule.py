"""A submodule of a sharded model is called outside the root's forward."""

# processes: 2

import torch
from small import CURED, join, load, shard

join()
model = shard(load())
if CURED:
    model.unshard()
model.lm_head(torch.randn(1, 4, 64))
