"""One optimizer group holds DTensor and plain parameters."""

# processes: 2

import torch
from small import CURED, join, load, shard, tokens
from torch import nn

join()
model = shard(load())
plain = nn.Parameter(torch.ones(3))
model(input_ids=tokens(), labels=tokens()).loss.backward()
plain.grad = torch.ones(3)
torch.optim.AdamW([*model.parameters(), plain], foreach=not CURED).step()
