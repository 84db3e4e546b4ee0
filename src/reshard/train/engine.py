"""The contract of an engine: what it is called, what it can do, needs and takes, and how it trains.

All else asks the `Engine` of a run, and knows none by its name. `engines.py` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from reshard.algebra.layout import Layout
from reshard.errors import Problem
from reshard.train.data.tokens import EVERYTHING, Learning
from reshard.train.run import SIZES, Run

if TYPE_CHECKING:
    from reshard.doctor.environment import Environment
    from reshard.train.data.tokens import Lengths
    from reshard.train.planning.speed import Work


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

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """What the model answered in a step: prompt, completion, and numbers by their names. Some are kept."""

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


@dataclass(frozen=True)
class Reading:
    """How an engine makes sequences of records. `length` is the option that bounds them."""

    length: str
    limit: int | None = None
    """Tokens of a record that are taken at most; None if it goes on in the next sequence, or nothing bounds it."""
    learning: Learning = EVERYTHING
    packed: bool = False
    """Whether several records share a sequence."""
    full: bool = False
    """Whether each sequence has the greatest length: packed, or padded."""
    mixed: bool = False
    """Whether records to evaluate on may have another shape than those to train on."""


@dataclass(frozen=True)
class Checkpoints:
    """What an engine saves while it trains.

    `pattern` matches the folders, `name` is that of a step. `last` is the one from which a run goes on, if there is
    one; `expected` says what is looked for, and `bound` what has to be as it was, by the name of the flag. `interval`
    is the number of steps between two, None if there is one at the end; `shares` into how many parts the ranks cut
    weights, and optimizer. `fewer` is what to do where the disk is too small.
    """

    pattern: str
    name: Callable[[int], str]
    last: Callable[[Path], Path | None]
    expected: str
    interval: Callable[[Mapping[str, Any]], float | None]
    shares: Callable[[Run, int], tuple[int, int]]
    fewer: str
    bound: Callable[[Run], Mapping[str, Any]] = lambda run: {}


Parts = Mapping[str, int]
"""Bytes by what they are taken for."""


@dataclass(frozen=True)
class Estimates:
    """What an engine takes of the fullest GPU, and which plans take less.

    `parts(run, batches, precision, world_size, gpu=…)` are bytes of what is there all the time, of what a step adds and
    of what generation adds; it raises ReshardError where they cannot be told. `parallelisms` are other ways to spread
    the model over so many ranks, with the words that ask for them; `savings` are options that take less memory for the
    same steps; both begin with what costs least. `smaller_batch` are the options of the smallest batch at a time.
    `work(run, batches, precision, world_size)` is what a GPU computes and sends in a step, `reserved` the part of a
    GPU's memory that something beside training takes.
    """

    parts: Callable[..., tuple[Parts, Parts, Parts]]
    parallelisms: Callable[[Run, int], Iterator[tuple[tuple[str, ...], Run]]]
    savings: Callable[[Run], Iterator[dict[str, object]]]
    smaller_batch: Callable[[Run], dict[str, object]]
    work: Callable[[Run, Batches, Precision, int], Work]
    reserved: Callable[[Run], float] = lambda run: 0.0


@dataclass(frozen=True)
class Looks:
    """What an engine looks at before a run starts; each yields problems, and starts nothing.

    `asked` is about the run as it is asked for, and needs nothing that could be missing. `machine(run, options,
    environment)` is about GPUs and packages, `model` about the folder and its division over the ranks.
    """

    asked: Callable[[Run], Iterator[Problem]]
    machine: Callable[[Run, Mapping[str, Any], Environment], Iterator[Problem]]
    model: Callable[[Run], Iterator[Problem]] = lambda run: iter(())


@dataclass(frozen=True)
class Engine:
    """One engine. None of its functions but `train` starts processes or needs a GPU; importing it imports no framework.

    `name` is what users type, `title` what texts call it. `methods` are
    those of `METHODS` that it trains with. `packages` are those whose versions matter to a run; `requires` says which
    of them have to be there, with the versions that will do. `leaves` are patterns of what it leaves in the output
    beside checkpoints, `dtypes` are the options that say in which dtype weights are trained. An engine that `tracks`
    reports to trackers by itself, one that `dequantizes` starts from a quantized model.

    `options` are all options of a run, typed, with what is taken where nothing is said: it raises ReshardError naming
    every one that is wrong, with the nearest that is right. `known_options` lists them for a method.

    `batches(run, world_size, samples, tokens)` is the arithmetic of a run over so many ranks and samples, which have so
    many tokens if that is known; it raises ReshardError where it does not come out. `precision` is what a parameter
    weighs, `evaluation` when a run with data to evaluate on is evaluated, in words; `plan` are the words for how the
    model is spread over so many ranks. `reading(run, options, record)` is how records like this one are read.

    `indexed` looks at Megatron's indexed datasets, if the engine reads such: how long the sequences of an epoch are. It
    raises ReshardError for what is wrong with them.

    `warm` imports what `train` needs, and touches no device: it is called on each rank while the run is looked at.

    `train` loads, asserts the plan, trains and saves; it is called on each rank, with the launcher's environment set.
    `check(run, trained, final)` is what differs between the weights in the folder `final` and those that were trained.
    """

    name: str
    title: str
    methods: tuple[str, ...]
    packages: tuple[str, ...]
    requires: Callable[[Run], Mapping[str, str]]
    known_options: Callable[[str], list[Option]]
    options: Callable[[Run], dict[str, Any]]
    looks: Looks
    reading: Callable[[Run, Mapping[str, Any], Mapping[str, Any]], Reading]
    batches: Callable[..., Batches]
    precision: Callable[[Run], Precision]
    dtypes: tuple[str, ...]
    evaluation: Callable[[Run], str]
    plan: Callable[[Run, int], list[str]]
    estimates: Estimates
    checkpoints: Checkpoints
    train: Callable[[Run, Monitor], Trained]
    check: Callable[[Run, Trained, Path], list[Problem]]
    warm: Callable[[Run], None] = lambda run: None
    indexed: Callable[[Run], Lengths] | None = None
    leaves: tuple[str, ...] = ()
    tracks: bool = False
    dequantizes: bool = False


def sizes_in_words(layout: Layout) -> list[str]:
    """As TP2, PP4: the sizes of a layout that are not 1."""
    sizes = {name.upper(): getattr(layout, name) for name in SIZES}
    return [f"{name}{size}" for name, size in sizes.items() if size > 1]
