"""An optimizer's states are loaded into a model of which more is trained."""

import torch
from small import CURED
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
frozen = model[1].requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
state = get_optimizer_state_dict(model, optimizer)

frozen.requires_grad_(True)
set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(strict=not CURED))
