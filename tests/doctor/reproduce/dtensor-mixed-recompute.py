"""Activation checkpointing, an FSDP2 module inside another, and two forward passes before the backward pass."""

# processes: 2
# needs: torch>=2.6,<2.7

import torch
from small import CURED, join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


class Moment:
    """An event of a CPU's stream, which this torch lacks: all work is done when it is recorded."""

    def wait(self):
        pass


torch.cpu.Stream.record_event = lambda self, event=None: event or Moment()
torch.cpu.Stream.wait_event = lambda self, event: None


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
        self.norm = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.norm(self.mlp(x))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


join()
model, mesh = Model(), init_device_mesh("cpu", (2,))
for layer in model.layers:
    if not CURED:
        fully_shard(layer.mlp, mesh=mesh)
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
chosen, rejected = model(torch.randn(2, 8)), model(torch.randn(2, 8))
(chosen.sum() - rejected.sum()).backward()
