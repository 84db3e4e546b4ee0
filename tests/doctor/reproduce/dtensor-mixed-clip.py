"""Gradient clipping over DTensor and plain gradients together."""

# processes: 2

import torch
from small import CURED, join, load, shard, tokens
from torch import nn

join()
plain = nn.Parameter(torch.ones(3))
model = shard(load())
model(input_ids=tokens(), labels=tokens()).loss.backward()
plain.grad = torch.ones(3)
sharded = list(model.parameters())
for parameters in [sharded, [plain]] if CURED else [[*sharded, plain]]:
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
