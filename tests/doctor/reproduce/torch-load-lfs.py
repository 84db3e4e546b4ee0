"""A .bin or .pt file is really a Git LFS pointer or a text."""

from pathlib import Path

import torch
from small import LFS_POINTER

Path("out/pytorch_model.bin").write_text(LFS_POINTER)
torch.load("out/pytorch_model.bin", weights_only=False)
