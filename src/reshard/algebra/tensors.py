"""Tensors as views, and the sources of views: bytes of a file, or computed elements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from reshard.algebra.dtypes import DType
from reshard.algebra.storage import Storage, StoredTensor
from reshard.algebra.views import Piece, View
from reshard.base.later_imports import imported_later

if TYPE_CHECKING:
    import numpy as np

with imported_later(__name__):
    from numpy.lib.stride_tricks import as_strided


class Cells(NamedTuple):
    """The elements of a storage, read as `dtype`: a source of views."""

    storage: Storage
    dtype: DType


class Computed(ABC):
    """Elements that are computed from others, such as the sum of a weight and an adapter: a source like `Cells`.

    This is the only operation besides re-indexing. `inputs` are everything it reads, so that plan and audit can follow
    it, and `memory_for` says how many bytes it needs, so that memory is limited before any is allocated.
    """

    dtype: DType
    inputs: tuple[Tensor, ...]
    mxfp4: tuple[Tensor, Tensor] | None = None
    """The blocks and the scales of a weight that is stored in MXFP4 as gpt-oss is, which others can store as well."""

    @abstractmethod
    def values(self, begin: int, end: int, read: InputReader) -> np.ndarray[Any, Any]:
        """Raw elements `begin` to `end`, in row-major order; `read` returns those of an input."""

    @abstractmethod
    def memory_for(self, count: int) -> int:
        """Most bytes of the arrays needed to compute `count` contiguous elements.

        The data read and the result count; what computing the inputs needs does not.
        """

    @property
    def few(self) -> int:
        """The least elements worth computing at a time: those of one block, if blocks are computed as a whole."""
        return MIN_READ_ELEMENTS

    @cached_property
    def least_memory(self) -> int:
        """Fewest bytes for computing anything: memory for `few` elements, and for computing their inputs."""
        return self.memory_for(self.few) + max(least_memory(tensor.view) for tensor in self.inputs)

    def runs(self, begin: int, count: int, step: int, length: int, read: InputReader) -> np.ndarray[Any, Any]:
        """Raw elements of `count` runs of `length`, each `step` after the one before: some columns of a matrix.

        Override this if a source need not compute the elements between the runs.
        """
        span = self.values(begin, begin + (count - 1) * step + length, read)
        strides = (step * span.itemsize, span.itemsize)
        return as_strided(span, (count, length), strides).flatten()

    def memory_for_runs(self, count: int, step: int, length: int) -> int:
        """Most bytes of the arrays needed for `count` runs of `length`; a source that overrides `runs` needs fewer."""
        return self.memory_for((count - 1) * step + length) + count * length * self.dtype.itemsize


MIN_READ_ELEMENTS = 1 << 14


class Tensor(NamedTuple):
    """A complete tensor of a checkpoint, as a view over `Cells`."""

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
        """The number of elements: more than its items if these are packed."""
        return self.dtype.elements(self.view.numel)

    @property
    def file(self) -> str:
        """The file with its first elements, for messages."""
        return self.file_of(0)

    def file_of(self, element: int) -> str:
        """The file with an element, counted in row-major order."""
        view = View((1,), self.view.window(element, element + 1))
        return next((cells.storage.path for cells in cells_of(view)), "?")

    @staticmethod
    def stored(stored: StoredTensor) -> Tensor:
        """A tensor that is one strided piece of one file."""
        cells = Cells(stored.storage, stored.dtype)
        view = View.of(cells, *stored.shape, start=stored.start, strides=stored.strides)
        return Tensor(stored.dtype, view)


def cells_of(view: View) -> Iterator[Cells]:
    """Everything that is read for a view, including the inputs of computed elements."""
    for piece in view.pieces:
        yield from cells_under(piece)


def cells_under(piece: Piece) -> Iterator[Cells]:
    """The same for one piece."""
    if isinstance(piece.source, Cells):
        yield piece.source
    elif isinstance(piece.source, Computed):
        for tensor in piece.source.inputs:
            yield from cells_of(tensor.view)


def least_memory(view: View) -> int:
    """Fewest bytes for computing the elements of a view; 0 if all of them are stored."""
    return max(
        [each.source.least_memory for each in view.pieces if isinstance(each.source, Computed)], default=0
    )


class InputReader(Protocol):
    """What a computed source gets its inputs with, and rounds its results with."""

    def __call__(self, tensor: Tensor, begin: int, end: int) -> np.ndarray[Any, Any]:
        """Raw elements `begin` to `end` of an input, in row-major order."""
        ...

    def cast(self, values: np.ndarray[Any, Any], source: DType, target: DType) -> np.ndarray[Any, Any]:
        """Raw elements of one float type as another, rounded once; finite values that become Inf are counted."""
        ...


class Replica(NamedTuple):
    """Two places that store the same elements by some rule, and so must be equal; `remedy` applies if they are not.

    Both have the same dtype. A copy stored in another dtype, such as fp32 masters, is rounded to it. If not `equal`,
    the two must differ instead.
    """

    tensor: str
    first: Tensor
    second: Tensor
    rule: str
    remedy: str = "the files are of different runs or iterations, or one is damaged: gather them again"
    code: str = "copies-differ"
    message: str = "a tensor is stored twice, with different values"
    equal: bool = True
