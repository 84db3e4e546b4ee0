"""Estimates of a run's memory on one GPU, whether it fits, and which plan would fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.base.errors import GIB, ReshardError, memory_size
from reshard.checks.environment import Environment
from reshard.training.engine import StateBytes, StepCounts
from reshard.training.engine_registry import engine_of
from reshard.training.run import Run

OVERHEAD_BYTES = GIB
"""What CUDA, cuBLAS and NCCL allocate, roughly; nothing on a CPU."""
USABLE_SHARE = 0.95
"""The part of a GPU's memory that can be filled before fragmentation makes allocations fail."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the fullest GPU. Generation and training alternate, so only the larger of the two counts."""

    always: Mapping[str, int]
    step: Mapping[str, int]
    generation: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The peak."""
        return sum(self.always.values()) + max(sum(self.step.values()), sum(self.generation.values()))

    @property
    def parts(self) -> dict[str, int]:
        """All parts by name, for a table."""
        return {**self.always, **self.step, **self.generation}

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"parts": self.parts, "total": self.total}


def estimate(
    run: Run, batches: StepCounts, precision: StateBytes, world_size: int, *, gpu: bool = True
) -> MemoryEstimate:
    """The memory of a run on the fullest of `world_size` GPUs."""
    parts = engine_of(run).estimates.parts
    always, step, generation = parts(run, batches, precision, world_size, gpu=gpu)
    return MemoryEstimate({**always, **({"CUDA and NCCL": OVERHEAD_BYTES} if gpu else {})}, step, generation)


def by_length(
    run: Run, batches: StepCounts, precision: StateBytes, world_size: int
) -> dict[int, tuple[int, int]]:
    """Bytes of activations at half, once and twice the length: if kept, and if recomputed."""

    def activations(length: int, again: bool) -> int:
        other = replace(batches, length=length), replace(precision, recomputation=again)
        return estimate(run, *other, world_size).step["activations"]

    lengths = max(batches.length // 2, 1), batches.length, batches.length * 2
    return {length: (activations(length, False), activations(length, True)) for length in lengths}


def fits(memory: MemoryEstimate, available: int) -> bool:
    """Whether it fits into `available` bytes."""
    return memory.total <= available * USABLE_SHARE


def available(environment: Environment, processes: int) -> int:
    """Bytes for each process of this machine: of the smallest GPU, or without GPUs a share of the free memory."""
    if environment.gpus:
        return min(gpu.memory for gpu in environment.gpus)
    import psutil

    return int(psutil.virtual_memory().available) // max(processes, 1)


@dataclass(frozen=True)
class Proposal:
    """A plan: the flags to add to the command, the run with them, its batches, and its memory."""

    flags: tuple[str, ...]
    run: Run
    batches: StepCounts
    memory: MemoryEstimate

    def __str__(self) -> str:
        return f"{' '.join(self.flags)} ({memory_size(self.memory.total)})"


def plan_that_fits(
    run: Run, world_size: int, samples: int, room: int, *, gpu: bool = True, length: int = 0
) -> Proposal | None:
    """The cheapest change of the plan that fits into `room` bytes; None if none of those tried does.

    The method, the data and LoRA do not change: these are up to the user. The samples per step do not change either.
    """
    plans = proposals(run, world_size, samples, length, gpu=gpu)
    return next((plan for plan in plans if fits(plan.memory, room)), None)


def proposals(
    run: Run, world_size: int, samples: int, length: int, *, gpu: bool = True
) -> Iterator[Proposal]:
    """The requested plan and others, the cheapest first, without those that the engine refuses.

    `length` is that of the longest sequence, if it is known better than from the options.
    """
    engine = engine_of(run)
    for flags, other in _candidates(run, world_size):
        with suppress(ReshardError):
            batches = engine.batches(other, world_size, samples)
            whole = replace(batches, length=length or batches.length)
            memory = estimate(other, whole, engine.precision(other), world_size, gpu=gpu)
            yield Proposal(flags, other, batches, memory)


def _candidates(run: Run, world_size: int) -> Iterator[tuple[tuple[str, ...], Run]]:
    """The requested plan and others, the cheapest first; smaller batches come last."""
    of_engine = engine_of(run).estimates
    for batch in ({}, *filter(None, [of_engine.smaller_batch(run)])):
        for flags, other in (((), run), *of_engine.parallelisms(run, world_size)):
            for saving in of_engine.savings(run):
                options = {**saving, **batch}
                words = tuple(f"--{name} {value}" for name, value in options.items())
                yield (*flags, *words), replace(other, options={**run.options, **options})
