"""Merged weights as sources of elements, computed block by block when they are read, as PEFT does (`peft_sums.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from reshard.adapters.blas import multiplied
from reshard.adapters.peft_sums import MIN_ROWS, product, row_norms
from reshard.algebra.dtypes import DType, dtype
from reshard.algebra.tensors import Computed, InputReader, Tensor
from reshard.transfer.elements import CAST_BYTES_EACH, RAW_DTYPES, as_float

FLOAT32 = dtype("float32")
BLOCK_ELEMENTS = 1 << 17
"""Elements computed at a time: a merge needs some float32 arrays of this size, which fit in the cache."""

READ_ELEMENTS = 1 << 20
"""Elements converted to float32 at a time."""

READ_BYTES_EACH = 16
"""Maximum bytes per element while it is read and converted to float32."""

BLOCK_BYTES_EACH = 44
"""Maximum bytes per element of a block, from the base as read to the rounded result."""

BLAS_COPY_BYTES = 8 << 20
"""Maximum bytes into which BLAS copies parts of its operands."""

Floats = np.ndarray[Any, Any]


@dataclass(frozen=True)
class WeightDelta:
    """The change of a weight: `scale` times `left` [rows, r] times `right` [r, columns].

    `magnitude` is DoRA's, one number for each row, or for each column if `by_column`. If `rounded`, the product is
    rounded to the dtype of the weight before it is added.
    """

    left: Tensor
    right: Tensor
    scale: float
    rounded: bool = False
    magnitude: Tensor | None = None
    by_column: bool = False


class MergedWeight(Computed):
    """`base` [rows, columns] with a delta, as `dtype`. Reads base and `left` block by block, `right` at once."""

    def __init__(self, base: Tensor, delta: WeightDelta, dtype: DType) -> None:
        multiplied.prepare()
        self.dtype = dtype
        self._base, self._delta = base, delta
        parts = (base, delta.left, delta.right, delta.magnitude)
        self.inputs = tuple(tensor for tensor in parts if tensor is not None)
        self._column_norms: Floats | None = None
        self._lock = Lock()

    def values(self, begin: int, end: int, read: InputReader) -> Floats:
        columns = self._base.shape[1]
        out = np.empty(end - begin, RAW_DTYPES[self.dtype.itemsize])
        right = _floats(read, self._delta.right)
        for block in self._blocks(begin // columns, -(-end // columns)):
            change = self._product(*block, right, read)
            for first, last in self._within(*block):
                low, high = max(begin, first * columns), min(end, last * columns)
                if low < high:
                    raw = self._rows(first, last, change[first - block[0] : last - block[0]], right, read)
                    out[low - begin : high - begin] = raw[low - first * columns : high - first * columns]
        return out

    @property
    def few(self) -> int:
        return self._step * self._base.shape[1]

    def memory_for(self, count: int) -> int:
        rows, columns = self._base.shape
        left, right, magnitude = self._delta.left, self._delta.right, self._delta.magnitude
        tall = min(rows, self._step)
        numbers = 0 if magnitude is None else magnitude.view.numel + 3 * columns
        product = tall * (2 * columns * 4 + left.shape[1] * READ_BYTES_EACH) + BLAS_COPY_BYTES
        block = max(
            product + max(BLOCK_ELEMENTS, columns) * BLOCK_BYTES_EACH, READ_ELEMENTS * READ_BYTES_EACH
        )
        return count * self.dtype.itemsize + right.view.numel * 4 + block + numbers * READ_BYTES_EACH

    @property
    def _step(self) -> int:
        """Number of rows of a block."""
        return max(BLOCK_ELEMENTS // self._base.shape[1] // MIN_ROWS, 1) * MIN_ROWS

    def _blocks(self, first: int, last: int) -> list[tuple[int, int]]:
        """Ranges of rows that cover rows `first` to `last`, each of at least `MIN_ROWS` if there are that many.

        Their boundaries do not depend on the requested range, so an element comes from the same product each time.
        """
        rows, step = self._base.shape[0], self._step
        starts = range(first - first % step, last, step)
        return [(start, min(start + step, rows)) for start in starts]

    def _within(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Parts of a block, of `BLOCK_ELEMENTS` elements or one row: enough for elementwise operations."""
        step = max(BLOCK_ELEMENTS // self._base.shape[1], 1)
        return ((low, min(low + step, last)) for low in range(first, last, step))

    def _rows(self, first: int, last: int, change: Floats, right: Floats, read: InputReader) -> Floats:
        """Raw elements of rows `first` to `last`; `change` is the product in these rows."""
        weight, change = self._parts(first, last, change, read)
        total = weight + change
        if self._delta.magnitude is not None:
            total = self._factors(first, last, total, right, read) * total
        return read.cast(
            np.ascontiguousarray(total, np.float32).reshape(-1).view(np.uint32), FLOAT32, self.dtype
        )

    def _parts(self, first: int, last: int, change: Floats, read: InputReader) -> tuple[Floats, Floats]:
        """The base and the change to add to it, in rows `first` to `last`."""
        columns = self._base.shape[1]
        raw = read(self._base, first * columns, last * columns)
        weight = as_float(_as(read, raw, self._base.dtype, self.dtype), self.dtype).reshape(-1, columns)
        change = change * np.float32(self._delta.scale)
        if self._delta.rounded:
            change = _rounded_values(read, change, self.dtype)
        return weight, change

    def _product(self, first: int, last: int, right: Floats, read: InputReader) -> Floats:
        rows, rank = self._delta.left.shape
        low = max(0, min(first, rows - MIN_ROWS))
        left = _floats(read, self._delta.left, low * rank, last * rank).reshape(-1, rank)
        return product(left, right.reshape(rank, -1))[first - low :]

    def _factors(self, first: int, last: int, total: Floats, right: Floats, read: InputReader) -> Floats:
        """DoRA's factors: the trained magnitude of each row (or column), divided by the norm of the sum."""
        assert self._delta.magnitude is not None
        magnitude = _floats(read, self._delta.magnitude)
        if self._delta.by_column:
            return magnitude / self._norms_of_columns(right, read)
        factors: Floats = magnitude[first:last, None] / row_norms(total)[:, None]
        return factors

    def _norms_of_columns(self, right: Floats, read: InputReader) -> Floats:
        """Norms over all rows, so the complete weight is read once before the first block is merged."""
        with self._lock:
            if self._column_norms is None:
                rows, columns = self._base.shape
                squares = np.zeros(columns, np.float32)
                for block in self._blocks(0, rows):
                    changes = self._product(*block, right, read)
                    for first, last in self._within(*block):
                        part = changes[first - block[0] : last - block[0]]
                        weight, change = self._parts(first, last, part, read)
                        rows_after = np.concatenate([squares[None], np.square(weight + change)])
                        squares = np.add.reduce(rows_after, 0)  # row after row
                self._column_norms = np.sqrt(squares)
            return self._column_norms


class ShiftedBias(Computed):
    """A bias [n] plus `scale` times the bias of lora_B, as `dtype`."""

    def __init__(self, base: Tensor, bias: Tensor, scale: float, dtype: DType) -> None:
        self.dtype = dtype
        self.inputs = (base, bias)
        self._scale = np.float32(scale)

    def memory_for(self, count: int) -> int:
        return count * (3 * READ_BYTES_EACH + CAST_BYTES_EACH)

    def values(self, begin: int, end: int, read: InputReader) -> Floats:
        base, bias = self.inputs
        weight = as_float(_as(read, read(base, begin, end), base.dtype, self.dtype), self.dtype)
        total = (weight + _floats(read, bias, begin, end) * self._scale).astype(np.float32)
        return read.cast(total.view(np.uint32), FLOAT32, self.dtype)


def _floats(read: InputReader, tensor: Tensor, begin: int = 0, end: int | None = None) -> Floats:
    """Elements of a tensor as float32; all of them if no range is given."""
    end = tensor.view.numel if end is None else end
    out = np.empty(end - begin, np.float32)
    for low in range(begin, end, READ_ELEMENTS):
        high = min(low + READ_ELEMENTS, end)
        out[low - begin : high - begin] = as_float(read(tensor, low, high), tensor.dtype)
    return out


def _as(read: InputReader, raw: Floats, stored: DType, wanted: DType) -> Floats:
    return raw if stored == wanted else read.cast(raw, stored, wanted)


def _rounded_values(read: InputReader, values: Floats, target: DType) -> Floats:
    """float32 values rounded to another dtype, converted back to float32."""
    raw = read.cast(np.ascontiguousarray(values).view(np.uint32), FLOAT32, target)
    return as_float(raw, target).astype(np.float32, copy=False)
