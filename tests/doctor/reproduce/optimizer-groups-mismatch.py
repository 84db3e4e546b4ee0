"""The saved optimizer belongs to another set of parameters."""

import torch
from small import CURED, load

model = load()
saved = torch.optim.AdamW(model.parameters()).state_dict()
some = [tensor for name, tensor in model.named_parameters() if CURED or "norm" not in name]
torch.optim.AdamW(some).load_state_dict(saved)
