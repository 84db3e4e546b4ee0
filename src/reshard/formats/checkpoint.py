"""A checkpoint that has been opened: what it holds and where, without a byte of any tensor read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reshard.algebra.layout import SavedLayout
from reshard.algebra.tensors import Replica, Tensor
from reshard.errors import Problem, count, size
from reshard.formats.quantization import Quantization


class States(Mapping[str, Mapping[str, Tensor]]):
    """Optimizer states by name, each looked up when it is asked for: they have thrice the chunks of the weights."""

    def __init__(self, readers: Mapping[str, Callable[[], Mapping[str, Tensor]]]) -> None:
        self._readers = readers
        self._found: dict[str, Mapping[str, Tensor]] = {}

    def __getitem__(self, state: str) -> Mapping[str, Tensor]:
        if state not in self._found:
            self._found[state] = self._readers[state]()
        return self._found[state]

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


Iteration = int | str
"""The step of a training run, or "release": what Megatron-LM calls weights that no run of its own wrote."""


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer of the Adam kind knows beside the states of its tensors.

    `step` counts its updates. `settings` are those of its first group of parameters under torch's names ("lr", "betas",
    "eps", "weight_decay"). `native` is what the format keeps of it, for a target of the same format.
    """

    step: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    native: Mapping[str, Any] = field(default_factory=dict)


SETTINGS = ("lr", "betas", "eps", "weight_decay")


def settings_of(group: Any) -> dict[str, Any]:
    """What a group of parameters says of Adam, as far as it is numbers: a schedule may have put tensors there."""
    found = {key: group[key] for key in SETTINGS if isinstance(group, Mapping) and key in group}
    return {key: value for key, value in found.items() if _is_number(value, pairs=key == "betas")}


def _is_number(value: Any, *, pairs: bool) -> bool:
    if pairs:
        return (
            isinstance(value, tuple | list)
            and len(value) == 2
            and all(type(n) in (int, float) for n in value)
        )
    return type(value) in (int, float)


@dataclass(repr=False)
class Checkpoint:
    """What a format's reader found.

    `dialect` says whose names `tensors` have: "hf" or that of an engine (`Family.dialects`). `root` is the folder
    where the config lies, `args` are Megatron-LM's arguments, `engine` is the one of Megatron's side whose names
    these are, `config` is a config.json as far as another engine's own config tells it. `states` holds optimizer
    states under the names of their tensors ("exp_avg", "exp_avg_sq", "fp32": the masters), which `--with-optimizer`
    carries together with `optimizer`. `dropped` counts bytes of what is there and not model weights, by rule
    ("random number states" …); the states count as "optimizer states", too. Of a merged model, `changes` are what
    its config says otherwise than the one in `root`. `beside` are folders whose tokenizer goes before the one
    there: that of an adapter, or of a Megatron-Bridge iteration. Where `flat` is true, a format keeps no shapes:
    tensors of one axis stand for those of as many elements that the family declares, until `model.resolve` reshapes
    them. `quantization` says which tensors are quantized weights; None if none are. Those in `spare` are left out if
    the family does not have them and they are zeros.
    """

    path: Path
    format: str
    dialect: str
    tensors: dict[str, Tensor]
    root: Path
    layout: SavedLayout = field(default_factory=SavedLayout)
    iteration: Iteration | None = None
    args: Mapping[str, Any] | None = None
    engine: str = "mcore"
    config: Mapping[str, Any] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[Path, ...] = ()
    states: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    optimizer: Optimizer | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    replicas: list[Replica] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    variant: str = ""
    flat: bool = False
    quantization: Quantization | None = None
    spare: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        """One line: the tensors of a large model would be megabytes of text."""
        return f"<{type(self).__name__} {self.format} {str(self.path)!r}: {self.amount}>"

    @property
    def amount(self) -> str:
        """How much it stores, for people."""
        tensors = len(self.tensors)
        named = "1 tensor" if tensors == 1 else f"{tensors:,} tensors"
        return f"{count(self.parameters)} parameters in {named}, {size(self.nbytes)}"

    @property
    def described_layout(self) -> str:
        """Which layout is recorded, and which sizes are not; empty for names of the hub, which belong to no ranks."""
        if self.dialect == "hf":
            return ""
        recorded, unrecorded = str(self.layout), self.layout.unrecorded
        if not recorded:
            return "not recorded"
        return f"{recorded} ({', '.join(unrecorded)} not recorded)" if unrecorded else recorded

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where its companions are; where two have a file of one name, the first counts."""
        return (*self.beside, self.root)

    @property
    def parameters(self) -> int:
        """The elements of all weights. Of quantized ones, neither packed items nor scales are counted."""
        if self.quantization:
            return self.quantization.parameters(self.tensors)
        return sum(tensor.elements for tensor in self.tensors.values())

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of the weight called `name`; None if there is none, or it is quantized and its shape not known."""
        weight = self.quantization.weights.get(name) if self.quantization else None
        if weight:
            return weight.shape(self.tensors[weight.values])
        return self.tensors[name].shape if name in self.tensors else None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def dtypes(self) -> dict[str, int]:
        """How many tensors there are of each dtype."""
        return dict(Counter(tensor.dtype.name for tensor in self.tensors.values()))
