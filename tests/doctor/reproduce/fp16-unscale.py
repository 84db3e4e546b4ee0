"""Trainable parameters are themselves fp16."""

import torch
from small import CURED
from torch import nn
from torch.amp import GradScaler

weight = nn.Parameter(torch.ones(2, dtype=torch.float32 if CURED else torch.float16))
optimizer = torch.optim.SGD([weight], lr=1.0)
scaler = GradScaler("cpu")
scaler.scale(weight.sum()).backward()
scaler.unscale_(optimizer)
