"""The interface of an engine: its name, its features, its requirements and options, and how it trains.

All other code uses the `Engine` of a run, and does not depend on its name. `engine_registry.py` lists the engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.algebra.layout import Layout
from reshard.base.errors import Problem
from reshard.guard.end.completeness import lacking
from reshard.training.data.tokens import LEARN_EVERYTHING, LossCoverage, Sample
from reshard.training.run import LAYOUT_SIZES, Run

if TYPE_CHECKING:
    from reshard.checks.environment import Environment
    from reshard.training.data.tokens import RecordLengths
    from reshard.training.planning.step_time import StepWork
    from reshard.training.show.metrics import MetricsWriter


@dataclass(frozen=True)
class StepCounts:
    """Samples per optimizer step, and the number of steps of a run."""

    per_device: int
    accumulation: int
    replicas: int
    steps: int
    length: int
    """Maximum tokens per sequence."""

    @property
    def samples(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.per_device * self.accumulation * self.replicas


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of its states. `recomputation` means that activations are recomputed."""

    weights: int
    gradients: int
    optimizer: int
    activations: int = 2
    recomputation: bool = False


@dataclass(frozen=True)
class Trained:
    """What a run records after its last step. `digests` are CRC32s of the weights in memory.

    The names and the parts of the weights are up to the engine, whose `check` reads them.
    """

    checkpoint: Path
    step: int
    digests: Mapping[str, int] = field(default_factory=dict)

    def differing(self, found: Mapping[str, int], folder: Path, what: str) -> Iterator[Problem]:
        """A problem for each weight with another CRC32 in a folder; `what` has it there."""
        for name in sorted(self.digests.keys() | found.keys()):
            expected, there = self.digests.get(name), found.get(name)
            if expected != there:
                yield Problem(
                    "trained-weight-differs",
                    "a weight differs from the trained one",
                    tensor=name,
                    file=str(folder),
                    rule=f"the CRC32 of {what}",
                    expected="no such weight" if expected is None else f"{expected:08x}",
                    found="no such weight" if there is None else f"{there:08x}",
                    remedy=f"convert it again (reshard convert {self.checkpoint} DST), and look at the disk if it "
                    "differs again",
                )


@dataclass(frozen=True)
class EngineOption:
    """An option of an engine, for `reshard train … --options`. `kind` is its type in words."""

    name: str
    kind: str
    default: str
    help: str


@dataclass(frozen=True)
class SequenceReading:
    """How an engine makes sequences from records. `length` is the option that limits them."""

    length: str
    limit: int | None = None
    """Maximum tokens used of a record; None if it continues in the next sequence, or has no limit."""
    learning: LossCoverage = LEARN_EVERYTHING
    packed: bool = False
    """Whether several records share a sequence."""
    full: bool = False
    """Whether each sequence has the maximum length: packed, or padded."""
    mixed: bool = False
    """Whether evaluation records may have another shape than training records."""


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints that an engine saves during training.

    `pattern` matches the folders, `name` is the name for a step. `saved` returns those that were saved completely, the
    latest last; `expected` describes what is searched for, and `bound` what must not have changed, by flag.
    `interval` is the number of steps between checkpoints, None if only the last step is saved; `shares` returns over
    how many ranks weights and optimizer are sharded. `fewer` is the remedy if the disk is too small.
    """

    pattern: str
    name: Callable[[int], str]
    saved: Callable[[Path], list[Path]]
    expected: str
    interval: Callable[[Mapping[str, Any]], float | None]
    shares: Callable[[Run, int], tuple[int, int]]
    fewer: Callable[[Run], str]
    bound: Callable[[Run], Mapping[str, Any]] = lambda run: {}

    def last(self, output: Path) -> Path | None:
        """The checkpoint from which a run continues: the last one that has all its files."""
        return next((each for each in reversed(self.saved(output)) if not lacking(each)), None)

    def damaged(self, output: Path) -> dict[Path, list[str]]:
        """What later checkpoints have lost."""
        found = [(each, lacking(each)) for each in self.saved(output)]
        whole = max((at for at, (_, lost) in enumerate(found) if not lost), default=-1)
        return dict(found[whole + 1 :])


MemoryParts = Mapping[str, int]
"""Bytes by purpose."""


@dataclass(frozen=True)
class Estimates:
    """Estimates of an engine for the fullest GPU, and of plans that need less.

    `parts(run, batches, precision, world_size, gpu=…)` returns bytes that are always allocated, that a step adds and
    that generation adds; it raises ReshardError if they cannot be estimated. `parallelisms` are other ways to shard the
    model over as many ranks, with their flags; `savings` are options that reduce memory for the same steps; both are
    sorted by cost, cheapest first. `smaller_batch` are the options for the smallest batch. `work(run, batches,
    precision, world_size)` is the computation and communication of a GPU in a step, `reserved` the share of a GPU's
    memory for other purposes.
    """

    parts: Callable[..., tuple[MemoryParts, MemoryParts, MemoryParts]]
    parallelisms: Callable[[Run, int], Iterator[tuple[tuple[str, ...], Run]]]
    savings: Callable[[Run], Iterator[dict[str, object]]]
    smaller_batch: Callable[[Run], dict[str, object]]
    work: Callable[[Run, StepCounts, StateBytes, int], StepWork]
    reserved: Callable[[Run], float] = lambda run: 0.0


@dataclass(frozen=True)
class EngineChecks:
    """Checks of an engine before a run starts; each yields problems, and starts nothing.

    `asked` checks the requested run, and needs no packages or files. `machine(run, options, environment)` checks GPUs
    and packages, `model` the folder and its division over the ranks. `loaded(run, options, environment)` needs the
    engine's packages imported, which takes seconds; the others import nothing.
    """

    asked: Callable[[Run], Iterator[Problem]]
    machine: Callable[[Run, Mapping[str, Any], Environment], Iterator[Problem]]
    model: Callable[[Run], Iterator[Problem]] = lambda run: iter(())
    loaded: Callable[[Run, Mapping[str, Any], Environment], Iterator[Problem]] = lambda *given: iter(())


@dataclass(frozen=True)
class Engine:
    """An engine. Only `train` starts processes or needs a GPU; importing an engine imports no framework.

    `name` is what users type, `title` its name in texts. `methods` are those of `TRAINING_METHODS` that it supports.
    `packages` are those whose versions matter to a run; `requires` returns the required ones with their versions.
    `leaves` are patterns of its files in the output besides checkpoints, `dtypes` are the options that set the dtype of
    training. An engine that `tracks` reports to trackers itself, one that `dequantizes` can start from a quantized
    model.

    `options` returns all options of a run, typed and with defaults; it raises ReshardError naming every wrong one, with
    the nearest valid name. `known_options` lists the options for a method.

    `batches(run, world_size, samples, tokens)` computes the steps of a run over these ranks and samples, with their
    number of tokens if known; it raises ReshardError if they do not divide. `precision` is the bytes per parameter,
    `evaluation` describes in words when evaluations run; `plan` describes how the model is sharded over the ranks.
    `reading(run, options, record)` is how records like this one are read.

    `sampler(run, options, tokenizer)` returns a function that makes the tokens of a record with images, if the engine
    trains on images. It raises ReshardError if the run cannot.

    `indexed` checks Megatron's indexed datasets, if the engine reads them, and returns the lengths of an epoch's
    sequences. It raises ReshardError for their problems.

    `warm` imports what `train` needs, and uses no device: it is called on each rank during the preflight, and returns
    whether there is anything that it has imported.

    `train` loads, asserts the plan, trains and saves; it is called on each rank, with the launcher's environment set.
    `check(run, trained, final)` returns differences between the weights in the folder `final` and the trained ones.
    """

    name: str
    title: str
    methods: tuple[str, ...]
    packages: tuple[str, ...]
    requires: Callable[[Run], Mapping[str, str]]
    known_options: Callable[[str], list[EngineOption]]
    options: Callable[[Run], dict[str, Any]]
    looks: EngineChecks
    reading: Callable[[Run, Mapping[str, Any], Mapping[str, Any]], SequenceReading]
    batches: Callable[..., StepCounts]
    precision: Callable[[Run], StateBytes]
    dtypes: tuple[str, ...]
    evaluation: Callable[[Run], str]
    plan: Callable[[Run, int], list[str]]
    estimates: Estimates
    checkpoints: Checkpoints
    train: Callable[[Run, MetricsWriter], Trained]
    check: Callable[[Run, Trained, Path], list[Problem]]
    warm: Callable[[Run], bool] = lambda run: False
    indexed: Callable[[Run], RecordLengths] | None = None
    sampler: Callable[[Run, Mapping[str, Any], Any], Callable[[Any], list[Sample]]] | None = None
    leaves: tuple[str, ...] = ()
    tracks: bool = False
    dequantizes: bool = False
    note: str = ""
    """A line that is printed before each run."""


def sizes_in_words(layout: Layout) -> list[str]:
    """The sizes of a layout that are not 1, in words: TP2, PP4."""
    sizes = {name.upper(): getattr(layout, name) for name in LAYOUT_SIZES}
    return [f"{name}{size}" for name, size in sizes.items() if size > 1]
