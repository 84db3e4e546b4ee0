"""A checkpoint saved on a GPU is loaded where there is none."""

from pathlib import Path

import torch
from small import CURED
from torch import nn

torch.save(nn.Linear(2, 2).state_dict(), "out/cpu.pt", _use_new_zipfile_serialization=False)
# On a GPU the same file names another device.
names = (b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
Path("out/cuda.pt").write_bytes(Path("out/cpu.pt").read_bytes().replace(*names))
torch.load("out/cuda.pt", map_location="cpu" if CURED else None)
