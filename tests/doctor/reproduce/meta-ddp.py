"""DDP over parameters on the meta device."""

# processes: 2

import torch
from small import CURED, join
from torch import nn
from torch.nn.parallel import DistributedDataParallel

join()
with torch.device("meta"):
    model = nn.Linear(4, 4)
DistributedDataParallel(model.to_empty(device="cpu") if CURED else model)
