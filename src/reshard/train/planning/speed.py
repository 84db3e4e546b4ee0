"""How long a step takes, estimated from what a GPU computes and what it sends: good enough to compare plans.

A GPU reaches `EFFICIENCY` of its data sheet in products of matrices. What is sent inside a node goes over its links,
between nodes over one network adapter for each GPU, and a collective of n ranks moves (n - 1) / n of its bytes. What an
engine sends while it computes costs nothing until it takes longer than computing. Nothing else is counted: no reading
of data, no kernels that wait for memory, no checkpoints, and of GRPO no generation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from reshard.train.memory.activations import Widths
from reshard.train.planning.gpus import Machine

EFFICIENCY = 0.5
NETWORK = 25.0
"""GB/s of one GPU's adapter: 200 Gbit/s."""
MADE_OF = (
    f"products of matrices at {EFFICIENCY:.0%} of the data sheet, collectives at the speed of NVLink or PCIe "
    f"inside a node and of {NETWORK * 8:.0f} Gbit/s for each GPU between nodes"
)
"""What the estimate is made of, in words."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a collective of `ranks` moves in a step, each `stride` ranks from the next. An all-reduce is two."""

    bytes: float
    ranks: int
    stride: int = 1

    def seconds(self, machine: Machine) -> float:
        """How long it takes; ring after ring, each over its own adapter where it leaves the node."""
        if self.ranks < 2:
            return 0.0
        speed = machine.card.link
        if self.ranks * self.stride > machine.count:
            speed = min(speed, NETWORK * max(machine.count // self.stride, 1))
        return self.bytes * (self.ranks - 1) / self.ranks / (speed * 1e9)


@dataclass(frozen=True)
class Work:
    """What a GPU does in a step. `idle` is the part of the time in which a stage waits for another."""

    flops: float
    hidden: tuple[Traffic, ...] = ()
    """What is sent while it computes."""
    waited: tuple[Traffic, ...] = ()
    """What it waits for."""
    idle: float = 0.0

    def seconds(self, machine: Machine) -> float:
        """How long a step takes on a machine, estimated."""
        computing = self.flops / (machine.card.tflops * 1e12 * EFFICIENCY)
        overlapped = max(computing, _sum(self.hidden, machine))
        return (overlapped + _sum(self.waited, machine)) / (1 - self.idle)


def _sum(traffic: Iterable[Traffic], machine: Machine) -> float:
    return sum(each.seconds(machine) for each in traffic)


def flops_of_token(widths: Widths, length: int) -> float:
    """Operations of one forward pass for a token of a sequence of `length`: two for each weight that it meets.

    Attention is causal, so that a token meets half of the others.
    """
    w = widths
    attention = w.hidden * (w.query + w.key + w.value) + w.query * w.hidden
    dense = 3 * w.hidden * w.ffn
    sparse = 3 * w.hidden * (w.experts * w.expert_ffn + w.shared_ffn) + w.hidden * w.router
    met = w.layers * attention + (w.layers - w.sparse) * dense + w.sparse * sparse + w.hidden * w.vocab
    return 2.0 * met + 2.0 * w.layers * w.query * length


def passes(*, recomputed: bool, frozen: bool) -> int:
    """Forward passes that a step is worth: backward is two, one for inputs and one for weights that are trained."""
    return 1 + recomputed + (1 if frozen else 2)
