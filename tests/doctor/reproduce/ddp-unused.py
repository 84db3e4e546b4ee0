"""DDP waits for gradients that never come."""

# processes: 2

import torch
from small import CURED, join
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


join()
model = DistributedDataParallel(Net(), find_unused_parameters=CURED)
for _ in range(2):
    model(torch.randn(2, 4)).sum().backward()
