"""An open checkpoint: what it contains and where, without reading tensor data."""

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
    """Optimizer states by name, each looked up on first use: they have three times the chunks of the weights."""

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
"""The step of a training run, or "release": Megatron-LM's name for weights that it did not train itself."""


@dataclass(frozen=True)
class Optimizer:
    """What an Adam-type optimizer stores in addition to the states of its tensors.

    `step` counts its updates. `settings` are those of its first parameter group under torch's names ("lr", "betas",
    "eps", "weight_decay"). `native` is the format's own record of it, for an output in the same format.
    """

    step: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    native: Mapping[str, Any] = field(default_factory=dict)


SETTINGS = ("lr", "betas", "eps", "weight_decay")


def settings_of(group: Any) -> dict[str, Any]:
    """The Adam settings of a parameter group that are plain numbers: a schedule may have put tensors there."""
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

    `dialect` names the naming scheme of `tensors`: "hf" or an engine's (`Family.dialects`). `root` is the folder with
    the config, `args` are Megatron-LM's arguments, `engine` is the Megatron-side engine that uses these names, `config`
    is a config.json derived from another engine's own config, as far as that goes. `states` stores optimizer states by
    kind ("exp_avg", "exp_avg_sq", "fp32": the masters) and tensor name; `--with-optimizer` converts them together with
    `optimizer`. `dropped` counts the bytes that are not model weights, by rule ("random number states" …), including
    "optimizer states". For a merged model, `changes` are the config values that differ from the config in `root`.
    `beside` are folders whose tokenizer takes precedence over the one in `root`: that of an adapter, or of a
    Megatron-Bridge iteration. If `flat` is true, the format stores no shapes: one-dimensional tensors represent tensors
    of as many elements that the family declares, until `model.resolve` reshapes them. `quantization` says which tensors
    are quantized weights; None if none are. Tensors in `spare` are left out if the family does not have them and they
    are zeros.
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
        """One line: listing the tensors of a large model would take megabytes."""
        return f"<{type(self).__name__} {self.format} {str(self.path)!r}: {self.amount}>"

    @property
    def amount(self) -> str:
        """How much it stores, as text."""
        tensors = len(self.tensors)
        named = "1 tensor" if tensors == 1 else f"{tensors:,} tensors"
        return f"{count(self.parameters)} parameters in {named}, {size(self.nbytes)}"

    @property
    def described_layout(self) -> str:
        """The recorded layout, and which sizes are not recorded; empty for Hub names, which do not depend on ranks."""
        if self.dialect == "hf":
            return ""
        recorded, unrecorded = str(self.layout), self.layout.unrecorded
        if not recorded:
            return "not recorded"
        return f"{recorded} ({', '.join(unrecorded)} not recorded)" if unrecorded else recorded

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders with companions; if two have a file of the same name, the first folder's is used."""
        return (*self.beside, self.root)

    @property
    def parameters(self) -> int:
        """The number of elements of all weights. For quantized ones, neither packed items nor scales are counted."""
        if self.quantization:
            return self.quantization.parameters(self.tensors)
        return sum(tensor.elements for tensor in self.tensors.values())

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of the weight called `name`; None if it does not exist, or is quantized with an unknown shape."""
        weight = self.quantization.weights.get(name) if self.quantization else None
        if weight:
            return weight.shape(self.tensors[weight.values])
        return self.tensors[name].shape if name in self.tensors else None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def dtypes(self) -> dict[str, int]:
        """The number of tensors of each dtype."""
        return dict(Counter(tensor.dtype.name for tensor in self.tensors.values()))
