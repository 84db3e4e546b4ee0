"""A weight in bf16 is to become an array of numpy."""

import torch
from small import CURED, load

weight = load(dtype=torch.bfloat16).lm_head.weight.detach()
(weight.float() if CURED else weight).numpy()
