"""This build of torch has no NCCL."""

# processes: 2

import torch
import torch.distributed as dist
from small import CURED, join

join(10, "gloo" if CURED else "nccl")
dist.all_reduce(torch.ones(1))
