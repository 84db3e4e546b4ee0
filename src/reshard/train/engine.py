"""What an engine is to the rest of training: the functions of a module, and what passes between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from reshard.errors import Problem
from reshard.train.run import Run

MODULES = {"trl": "reshard.train.trl", "megatron": "reshard.train.megatron"}


@dataclass(frozen=True)
class Batches:
    """The arithmetic of a run: samples of one optimizer step, and how many steps there will be."""

    per_device: int
    accumulation: int
    replicas: int
    steps: int
    length: int
    """Tokens of a sequence, at most."""

    @property
    def samples(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.per_device * self.accumulation * self.replicas


@dataclass(frozen=True)
class Precision:
    """What the states of a parameter weigh, in bytes. `recomputation` is whether activations are computed again."""

    weights: int
    gradients: int
    optimizer: int
    activations: int = 2
    recomputation: bool = False


@dataclass(frozen=True)
class Trained:
    """What a run has left when its last step is done. `digests` are CRC32s of the weights as they lay in memory.

    Under which names, and of which parts, is the engine's own affair: its `check` reads them again.
    """

    checkpoint: Path
    step: int
    digests: Mapping[str, int] = field(default_factory=dict)


class Monitor(Protocol):
    """Where an engine reports; only what rank 0 says is written."""

    def begin(self, steps: int, done: int = 0) -> None:
        """Training starts after step `done`, and ends with step `steps`."""

    def step(self, step: int, **metrics: float) -> None:
        """What a step measured: loss, learning_rate, grad_norm, tokens (of all ranks in this step), memory (bytes)."""

    def evaluated(self, step: int, **metrics: float) -> None:
        """What an evaluation after a step measured: eval_loss, and eval_… of whatever else; `seconds` that it took."""

    def saved(self, checkpoint: Path) -> None:
        """A checkpoint is complete on disk."""

    def note(self, text: str) -> None:
        """What the user should know."""


@dataclass(frozen=True)
class Option:
    """One option of an engine, for `reshard train … --options`. `kind` is its type in words."""

    name: str
    kind: str
    default: str
    help: str


class Engine(Protocol):
    """A module of `MODULES`. None of these but `train` starts processes or needs a GPU."""

    def known_options(self, method: str) -> list[Option]:
        """Every option that the engine takes for a method."""

    def options(self, run: Run) -> dict[str, Any]:
        """The engine's options of a run, typed, with what it takes where nothing is said.

        Raises ReshardError naming every option that the engine does not have, with the nearest that it has.
        """

    def batches(self, run: Run, world_size: int, samples: int) -> Batches:
        """The arithmetic of a run over so many ranks and samples. Raises ReshardError where it does not come out."""

    def precision(self, run: Run) -> Precision:
        """What a parameter weighs while it is trained."""

    def evaluation(self, run: Run) -> str:
        """When a run with data to evaluate on is evaluated, in words."""

    def train(self, run: Run, monitor: Monitor) -> Trained:
        """Load, assert the plan, train, save. Called on each rank, with the launcher's environment set."""

    def check(self, run: Run, trained: Trained, final: Path) -> list[Problem]:
        """What differs between the weights in the folder `final` and those that were trained."""


def engine_of(run: Run) -> Engine:
    """The engine of a run; importing it imports no framework yet."""
    return cast(Engine, import_module(MODULES[run.engine]))
