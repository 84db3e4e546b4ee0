"""flash-attention 2 asked for but not usable."""

import torch
from small import CURED, load

load(attn_implementation="sdpa" if CURED else "flash_attention_2", dtype=torch.bfloat16)
