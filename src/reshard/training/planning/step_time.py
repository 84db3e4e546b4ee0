"""The time of a step, estimated from the speed of GPUs and links: good enough to compare plans.

A GPU reaches `USUAL_EFFICIENCY` of its data sheet in matrix products. Traffic inside a node uses its links, traffic
between nodes one network adapter per GPU, and a collective of n ranks moves (n - 1) / n of its bytes. Communication
that overlaps with computation costs nothing until it takes longer. Nothing else is counted: no data loading, no
memory-bound kernels, no checkpoints, and for GRPO no generation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from reshard.training.memory.activations import LayerWidths
from reshard.training.planning.gpu_models import PlannedMachine

USUAL_EFFICIENCY = 0.5
NETWORK_GB_PER_SECOND = 25.0
"""GB/s of each GPU's network adapter: 200 Gbit/s."""
COLLECTIVE_FACTORS = (
    f"products of matrices at {USUAL_EFFICIENCY:.0%} of the data sheet, collectives at the speed of NVLink or PCIe "
    f"inside a node and of {NETWORK_GB_PER_SECOND * 8:.0f} Gbit/s for each GPU between nodes"
)
"""What the estimate is based on, in words."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a collective of `ranks` moves in a step, `stride` ranks apart. An all-reduce counts twice."""

    bytes: float
    ranks: int
    stride: int = 1

    def seconds(self, machine: PlannedMachine) -> float:
        """Seconds of the transfer. Rings that leave the node run one after another, each over its own adapter."""
        if self.ranks < 2:
            return 0.0
        speed = machine.card.link
        if self.ranks * self.stride > machine.count:
            speed = min(speed, NETWORK_GB_PER_SECOND * max(machine.count // self.stride, 1))
        return self.bytes * (self.ranks - 1) / self.ranks / (speed * 1e9)


@dataclass(frozen=True)
class StepWork:
    """What a GPU does in a step. `idle` is the share of time that a pipeline stage waits for others."""

    flops: float
    hidden: tuple[Traffic, ...] = ()
    """Communication that overlaps with computation."""
    waited: tuple[Traffic, ...] = ()
    """Communication for which the GPU waits."""
    idle: float = 0.0

    def seconds(self, machine: PlannedMachine) -> float:
        """Estimated seconds of a step on a machine."""
        computing = self.flops / (machine.card.tflops * 1e12 * USUAL_EFFICIENCY)
        overlapped = max(computing, _sum(self.hidden, machine))
        return (overlapped + _sum(self.waited, machine)) / (1 - self.idle)


def _sum(traffic: Iterable[Traffic], machine: PlannedMachine) -> float:
    return sum(each.seconds(machine) for each in traffic)


def flops_of_token(widths: LayerWidths, length: int) -> float:
    """Operations of one forward pass for a token in a sequence of `length`: two for each weight that is used.

    Attention is causal, so a token attends to half of the others on average.
    """
    w = widths
    attention = w.hidden * (w.query + w.key + w.value) + w.query * w.hidden
    dense = 3 * w.hidden * w.ffn
    sparse = 3 * w.hidden * (w.experts * w.expert_ffn + w.shared_ffn) + w.hidden * w.router
    met = w.layers * attention + (w.layers - w.sparse) * dense + w.sparse * sparse + w.hidden * w.vocab
    return 2.0 * met + 2.0 * w.layers * w.query * length


def passes(*, recomputed: bool, frozen: bool) -> int:
    """Forward passes to which a step is equivalent: backward counts two, one for inputs and one for trained weights."""
    return 1 + recomputed + (1 if frozen else 2)
