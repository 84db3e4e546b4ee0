"""Names in the file carry a wrapper's prefix."""

import torch
from small import CURED, load
from torch import nn

model = load()
wrapped = nn.DataParallel(model)
torch.save((model if CURED else wrapped).state_dict(), "out/model.pt")
model.load_state_dict(torch.load("out/model.pt"))
