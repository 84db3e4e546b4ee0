"""from_pretrained under a meta device context."""

import torch
from small import CURED, load

with torch.device("cpu" if CURED else "meta"):
    load()
