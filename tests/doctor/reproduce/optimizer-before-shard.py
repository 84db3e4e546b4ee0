"""The optimizer was built before the model was sharded."""

# processes: 2

import torch
from small import CURED, join, load, shard, tokens

join()
model = load()
if CURED:
    shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if not CURED:
    shard(model)
losses = []
for _ in range(3):
    losses.append(model(input_ids=tokens(), labels=tokens()).loss)
    losses[-1].backward()
    optimizer.step()
assert (losses[2] < losses[0]) if CURED else (losses[2] == losses[0])
