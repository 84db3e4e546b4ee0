"""Estimates of a run's memory on one GPU, whether it fits, and which plan would fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.base.errors import GIB, ReshardError, memory_size
from reshard.checks.environment import Environment
from reshard.training.engine import Batches, Precision
from reshard.training.engines import engine_of
from reshard.training.run import Run

OVERHEAD = GIB
"""What CUDA, cuBLAS and NCCL allocate, roughly; nothing on a CPU."""
USABLE = 0.95
"""The part of a GPU's memory that can be filled before fragmentation makes allocations fail."""


@dataclass(frozen=True)
class Memory:
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
    run: Run, batches: Batches, precision: Precision, world_size: int, *, gpu: bool = True
) -> Memory:
    """The memory of a run on the fullest of `world_size` GPUs."""
    parts = engine_of(run).estimates.parts
    always, step, generation = parts(run, batches, precision, world_size, gpu=gpu)
    return Memory({**always, **({"CUDA and NCCL": OVERHEAD} if gpu else {})}, step, generation)


def by_length(
    run: Run, batches: Batches, precision: Precision, world_size: int
) -> dict[int, tuple[int, int]]:
    """Bytes of activations at half, once and twice the length: if kept, and if recomputed."""
    return {
        length: (
            _activations(run, replace(batches, length=length), precision, world_size, again=False),
            _activations(run, replace(batches, length=length), precision, world_size, again=True),
        )
        for length in (max(batches.length // 2, 1), batches.length, batches.length * 2)
    }


def _activations(run: Run, batches: Batches, precision: Precision, world_size: int, *, again: bool) -> int:
    precision = replace(precision, recomputation=again)
    return estimate(run, batches, precision, world_size).step["activations"]


def fits(memory: Memory, available: int) -> bool:
    """Whether it fits into `available` bytes."""
    return memory.total <= available * USABLE


def available(environment: Environment, processes: int) -> int:
    """Bytes for each process of this machine: of the smallest GPU, or without GPUs a share of the free memory."""
    if environment.gpus:
        return min(gpu.memory for gpu in environment.gpus)
    import psutil

    return int(psutil.virtual_memory().available) // max(processes, 1)


@dataclass(frozen=True)
class Proposal:
    """A plan that fits: the flags to add to the command, and its memory."""

    flags: tuple[str, ...]
    memory: Memory

    def __str__(self) -> str:
        return f"{' '.join(self.flags)} ({memory_size(self.memory.total)})"


def plan_that_fits(
    run: Run, world_size: int, samples: int, room: int, *, gpu: bool = True, length: int = 0
) -> Proposal | None:
    """The cheapest change of the plan that fits into `room` bytes; None if none of those tried does.

    The method, the data and LoRA do not change: these are up to the user. The samples per step do not change either.
    `length` is that of the longest sequence, if it is known better than from the options.
    """
    for flags, other in candidates(run, world_size):
        memory = tried(other, world_size, samples, length, gpu=gpu)
        if memory is not None and fits(memory, room):
            return Proposal(flags, memory)
    return None


def tried(run: Run, world_size: int, samples: int, length: int, *, gpu: bool) -> Memory | None:
    """The memory of another plan; None if the engine refuses it."""
    engine = engine_of(run)
    try:
        batches = engine.batches(run, world_size, samples)
        batches = replace(batches, length=length or batches.length)
        return estimate(run, batches, engine.precision(run), world_size, gpu=gpu)
    except ReshardError:
        return None


def candidates(run: Run, world_size: int) -> Iterator[tuple[tuple[str, ...], Run]]:
    """Other plans than the requested one, the cheapest first; smaller batches come last."""
    of_engine = engine_of(run).estimates
    nothing: dict[str, object] = {}
    for batch in (nothing, of_engine.smaller_batch(run)):
        for flags, other in (((), run), *of_engine.parallelisms(run, world_size)):
            for saving in of_engine.savings(run):
                options = {**saving, **batch}
                if flags or options:
                    words = tuple(f"--{name} {value}" for name, value in options.items())
                    yield (*flags, *words), replace(other, options={**run.options, **options})
