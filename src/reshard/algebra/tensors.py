"""Tensors as views, and what is at the bottom of a view: bytes of a file, or elements that are computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from reshard.algebra.dtypes import DType
from reshard.algebra.storage import Storage, StoredTensor
from reshard.algebra.views import Piece, View


class Cells(NamedTuple):
    """The elements of a storage, read as `dtype`: the source at the bottom of a view."""

    storage: Storage
    dtype: DType


class Computed(ABC):
    """Elements that are computed from others, such as the sum of a weight and an adapter: a source like `Cells`.

    It is the one thing that is not re-indexing. `inputs` are all it reads, so that plan and audit see through it, and
    `room` is what it takes, so that memory is bounded before any is taken.
    """

    dtype: DType
    inputs: tuple[Tensor, ...]

    @abstractmethod
    def values(self, begin: int, end: int, read: Read) -> np.ndarray[Any, Any]:
        """Raw elements `begin` to `end`, in row-major order. `read(tensor, begin, end)` gives those of an input."""

    @abstractmethod
    def room(self, count: int) -> int:
        """Bytes at most of the arrays that computing `count` elements side by side takes.

        What is read for them counts, and so does the result; what computing the inputs takes does not.
        """

    @property
    def few(self) -> int:
        """Elements of which it does not pay to compute fewer at a time: a block that is computed as a whole, if any."""
        return FEW

    @cached_property
    def least(self) -> int:
        """Bytes without which nothing can be computed: room for `few` elements, and for those that they are made of."""
        return self.room(self.few) + max(least_room(tensor.view) for tensor in self.inputs)

    def runs(self, begin: int, count: int, step: int, length: int, read: Read) -> np.ndarray[Any, Any]:
        """Raw elements of `count` runs of `length`, each `step` after the one before: some columns of a matrix.

        A source overrides it if it need not compute what lies between.
        """
        span = self.values(begin, begin + (count - 1) * step + length, read)
        strides = (step * span.itemsize, span.itemsize)
        return as_strided(span, (count, length), strides).flatten()

    def room_of_runs(self, count: int, step: int, length: int) -> int:
        """What `room` says, of `count` runs: a source that overrides `runs` needs less."""
        return self.room((count - 1) * step + length) + count * length * self.dtype.itemsize


FEW = 1 << 14


Source = Cells | Computed


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
    def elements(self) -> int:
        """How many numbers it holds: more than its items where these are packed."""
        return self.dtype.elements(self.view.numel)

    @property
    def file(self) -> str:
        """The file that holds its first elements, for messages."""
        return self.file_of(0)

    def file_of(self, element: int) -> str:
        """The file that holds an element, in row-major order."""
        view = View((1,), self.view.window(element, element + 1))
        return next((cells.storage.path for cells in cells_of(view)), "?")

    @staticmethod
    def stored(stored: StoredTensor) -> Tensor:
        """The tensor that lies in one strided piece of one file."""
        cells = Cells(stored.storage, stored.dtype)
        view = View.of(cells, *stored.shape, start=stored.start, strides=stored.strides)
        return Tensor(stored.dtype, view)


def cells_of(view: View) -> Iterator[Cells]:
    """Everything that is read for a view, those inputs included that its elements are computed from."""
    for piece in view.pieces:
        yield from cells_under(piece)


def cells_under(piece: Piece) -> Iterator[Cells]:
    """The same for one piece."""
    if isinstance(piece.source, Cells):
        yield piece.source
    elif isinstance(piece.source, Computed):
        for tensor in piece.source.inputs:
            yield from cells_of(tensor.view)


def least_room(view: View) -> int:
    """Bytes without which the elements of a view cannot be computed; 0 if all of them are stored."""
    sources = (piece.source for piece in view.pieces)
    return max((source.least for source in sources if isinstance(source, Computed)), default=0)


Read = Callable[[Tensor, int, int], "np.ndarray[Any, Any]"]


class Replica(NamedTuple):
    """Two places that hold the same elements by some rule, and so must be equal; `remedy` if they are not.

    Both have one dtype. What a place stores in another one, such as fp32 masters, is rounded to it.
    """

    tensor: str
    first: Tensor
    second: Tensor
    rule: str
    remedy: str = "the files are of different runs or iterations, or one is damaged: gather them again"
    code: str = "copies-differ"
    message: str = "a tensor is stored twice, with different values"
