"""A collective before the process group exists."""

import torch.distributed as dist
from small import CURED

if CURED:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
dist.barrier()
