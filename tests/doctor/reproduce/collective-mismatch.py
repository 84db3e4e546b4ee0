"""Two ranks run different collectives."""

# processes: 2
# environment: TORCH_DISTRIBUTED_DEBUG=DETAIL

import torch
import torch.distributed as dist
from small import CURED, join, rank

join(15)
tensor = torch.ones(1)
if rank == 0 or CURED:
    dist.all_reduce(tensor)
else:
    dist.broadcast(tensor, 0)
