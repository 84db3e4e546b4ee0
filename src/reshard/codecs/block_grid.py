"""Blocks of a weight that share a scale, and conversion to and from 8-bit and 4-bit codes."""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from reshard.algebra.dtypes import DType, dtype
from reshard.transfer.elements import Overflows, as_float, cast
from reshard.transfer.elements import small_floats as small_floats

FLOAT32 = dtype("float32")
Floats = np.ndarray[Any, Any]

STEP_ELEMENTS = 1 << 15
"""Elements rounded at a time: their float32 values fit in the cache of a core."""


class BlockGrid(NamedTuple):
    """Stacked matrices [rows, columns] in blocks of `tall` × `wide`; those at the edges are smaller.

    Rows are counted over all matrices. Each matrix has [⌈rows / tall⌉, ⌈columns / wide⌉] scales, their rows
    counted likewise.
    """

    rows: int
    columns: int
    tall: int
    wide: int

    @property
    def high(self) -> int:
        """Rows of scales per matrix."""
        return -(-self.rows // self.tall)

    @property
    def across(self) -> int:
        """Scales per row."""
        return -(-self.columns // self.wide)

    def of_rows(self, first: int, last: int) -> Floats:
        """For each of the rows `first` to `last`, the index of its row of scales."""
        rows = np.arange(first, last)
        scales: Floats = rows // self.rows * self.high + rows % self.rows // self.tall
        return scales

    def scales_of(self, rows: int) -> int:
        """The largest number of rows of scales that `rows` rows can touch, at any offset."""
        return rows if self.tall == 1 else 2 * (rows // min(self.tall, self.rows) + 1)

    def rows_of(self, scales: int) -> tuple[int, int]:
        """The first and the last row that a row of scales covers."""
        matrix, block = divmod(scales, self.high)
        start = matrix * self.rows
        return start + block * self.tall, start + min((block + 1) * self.tall, self.rows)

    def multiply(self, values: Floats, scales: Floats) -> None:
        """Multiply rows of values, or complete blocks of their columns, by their rows of scales, in place."""
        if values.shape[1] % self.wide:
            values *= np.repeat(scales, self.wide, axis=1)[:, : values.shape[1]]
        else:
            blocks = values.reshape(len(values), -1, self.wide)
            blocks *= scales[:, :, None]

    def largest(self, raw: Floats, first: int, last: int) -> Floats:
        """The largest magnitude of each block in the rows of scales `first` to `last`, whose floats are in `raw`.

        Both are raw bits: without the sign bit, the bits of floats are ordered like the floats, and NaN is above all.
        """
        magnitude = raw.dtype.type((1 << (8 * raw.itemsize - 1)) - 1)
        out = np.empty((last - first, self.across), raw.dtype)
        begin, several = self.rows_of(first)[0], max(1, STEP_ELEMENTS // self.columns)
        step = several if self.tall == 1 else 1
        for low in range(first, last, step):
            high = min(low + step, last)
            rows = raw[self.rows_of(low)[0] - begin : self.rows_of(high - 1)[1] - begin]
            if self.tall == 1:
                rows = rows & magnitude
            else:  # a step has one row of scales
                parts = (rows[at : at + several] & magnitude for at in range(0, len(rows), several))
                rows = reduce(np.maximum, (part.max(0, keepdims=True) for part in parts))
            if self.columns % self.wide:
                rows = np.pad(rows, ((0, 0), (0, -self.columns % self.wide)))
            out[low - first : high - first] = rows.reshape(len(rows), -1, self.wide).max(2)
        return out


def raw_floats(values: Floats, kind: DType) -> Floats:
    """The raw bits of float32 values that are rounded to another dtype."""
    return cast(np.ascontiguousarray(values, np.float32).view(np.uint32), FLOAT32, kind, Overflows())


def rounded_to(values: Floats, kind: DType) -> Floats:
    """Float32 values rounded to another dtype."""
    return as_float(raw_floats(values, kind), kind).astype(np.float32)


def nearest_codes(values: Floats) -> Floats:
    """A table with the nearest code for each upper half of a float32's bits.

    The last bit of an upper half must be set if the lower half is not zero, which avoids double rounding. Ties go to
    the even code; values that are too large become the largest, and NaN becomes the last code of its sign.
    `values` are those of all codes, from `small_floats`.
    """
    half = len(values) // 2
    positive = values[:half][np.isfinite(values[:half])]
    middles = (positive[1:] + positive[:-1]) / 2
    keys = (np.arange(1 << 15, dtype=np.uint32) << 16).view(np.float32)
    low, high = (np.searchsorted(middles, keys, side) for side in ("left", "right"))
    codes = np.where(low % 2, high, low)
    codes[np.isnan(keys)] = half - 1
    table: Floats = np.concatenate([codes, codes + half]).astype(np.uint8)
    return table


def codes_of(values: Floats, table: Floats) -> Floats:
    """The code of each float32 value, by a table from `nearest_codes`."""
    bits = values.view(np.uint32)
    keys = bits & 0xFFFF
    keys += 0xFFFF  # carries into the upper half if the lower one is not zero
    keys |= bits
    keys >>= 16
    return table.take(keys.astype(np.intp))
