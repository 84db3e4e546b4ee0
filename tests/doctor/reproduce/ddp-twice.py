"""DDP sees a parameter ready twice."""

# processes: 2

import torch
from small import CURED, join
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.again, self.first(x), use_reentrant=not CURED)
        return x


join()
model = DistributedDataParallel(Net(), find_unused_parameters=not CURED)
model(torch.randn(2, 4)).sum().backward()
