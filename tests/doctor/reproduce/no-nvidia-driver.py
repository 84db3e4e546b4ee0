"""torch sees no NVIDIA driver."""

# needs: torch<2.7

import torch
from small import CURED

torch.ones(1, device="cpu" if CURED else "cuda")
