"""A layer that was added in fp32 to a model in bf16."""

import torch
from small import CURED, load

model = load(dtype=torch.bfloat16)
head = torch.nn.Linear(model.config.hidden_size, 1)
if CURED:
    head.to(torch.bfloat16)
head(model.model(torch.ones(1, 4, dtype=torch.long)).last_hidden_state)
