"""A checkpoint that has been opened: what it holds and where, without a byte of any tensor read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from reshard.dtypes import DType
from reshard.errors import Problem
from reshard.layout import Layout
from reshard.storage import Storage, StoredTensor
from reshard.views import View


class Cells(NamedTuple):
    """The elements of a storage, read as `dtype`: the source at the bottom of every view."""

    storage: Storage
    dtype: DType


class Tensor(NamedTuple):
    """A whole tensor of a checkpoint, as a view over `Cells`."""

    dtype: DType
    view: View

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    @property
    def nbytes(self) -> int:
        return self.view.numel * self.dtype.itemsize

    @property
    def file(self) -> str:
        """The file that holds its first elements, for messages."""
        source = next((piece.source for piece in self.view.pieces), None)
        return source.storage.path if isinstance(source, Cells) else "?"

    @staticmethod
    def stored(stored: StoredTensor) -> Tensor:
        """The tensor that lies in one strided piece of one file."""
        cells = Cells(stored.storage, stored.dtype)
        view = View.of(cells, *stored.shape, start=stored.start, strides=stored.strides)
        return Tensor(stored.dtype, view)


class Replica(NamedTuple):
    """Two places that hold the same elements by some rule, and so must be equal; `remedy` if they are not."""

    tensor: str
    first: Tensor
    second: Tensor
    rule: str
    remedy: str = "the files are of different runs or iterations, or one is damaged: gather them again"


@dataclass
class Checkpoint:
    """What a format's reader found.

    `dialect` says whose names `tensors` have: "hf" or "mcore". `root` is the folder where the config lies,
    `args` are Megatron-LM's arguments. `dropped` counts bytes of what is there and not model weights, by rule
    ("optimizer states", "random number states" …).
    """

    path: Path
    format: str
    dialect: str
    tensors: dict[str, Tensor]
    root: Path
    layout: Layout = field(default_factory=Layout)
    iteration: int | str | None = None
    args: Mapping[str, Any] | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    replicas: list[Replica] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    variant: str = ""

    @property
    def parameters(self) -> int:
        return sum(tensor.view.numel for tensor in self.tensors.values())

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def dtypes(self) -> dict[str, int]:
        """How many tensors there are of each dtype."""
        return dict(Counter(tensor.dtype.name for tensor in self.tensors.values()))
