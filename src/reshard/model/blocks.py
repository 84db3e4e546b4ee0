"""Blocks of a weight that share a scale, and how numbers of eight and of four bits stand for others."""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import numpy as np

Floats = np.ndarray[Any, Any]

STEP = 1 << 15
"""Elements rounded at a time: their float32 values stay in the cache of a core."""


class Blocks(NamedTuple):
    """Matrices [rows, columns], one below the other, in blocks of `tall` × `wide`; those at the edges are smaller.

    Rows are counted over all matrices. Scales are [⌈rows / tall⌉, ⌈columns / wide⌉] for each matrix, counted alike.
    """

    rows: int
    columns: int
    tall: int
    wide: int

    @property
    def high(self) -> int:
        """Rows of scales that a matrix has."""
        return -(-self.rows // self.tall)

    @property
    def across(self) -> int:
        """Scales in a row."""
        return -(-self.columns // self.wide)

    def of_rows(self, first: int, last: int) -> Floats:
        """The row of scales that each of the rows `first` to `last` has."""
        rows = np.arange(first, last)
        scales: Floats = rows // self.rows * self.high + rows % self.rows // self.tall
        return scales

    def scales_of(self, rows: int) -> int:
        """How many rows of scales `rows` rows have, at most, wherever they begin."""
        return rows if self.tall == 1 else 2 * (rows // min(self.tall, self.rows) + 1)

    def rows_of(self, scales: int) -> tuple[int, int]:
        """The first and the last row of a row of scales."""
        matrix, block = divmod(scales, self.high)
        start = matrix * self.rows
        return start + block * self.tall, start + min((block + 1) * self.tall, self.rows)

    def multiply(self, values: Floats, scales: Floats) -> None:
        """Multiply rows of values, or some whole blocks of their columns, by their rows of scales, in place."""
        if values.shape[1] % self.wide:
            values *= np.repeat(scales, self.wide, axis=1)[:, : values.shape[1]]
        else:
            blocks = values.reshape(len(values), -1, self.wide)
            blocks *= scales[:, :, None]

    def largest(self, raw: Floats, first: int, last: int) -> Floats:
        """The largest magnitude of each block in the rows of scales `first` to `last`, of which `raw` has the floats.

        Both are bits: without the sign, those of floats are in order, and NaN is above all.
        """
        magnitude = raw.dtype.type((1 << (8 * raw.itemsize - 1)) - 1)
        out = np.empty((last - first, self.across), raw.dtype)
        begin, several = self.rows_of(first)[0], max(1, STEP // self.columns)
        step = several if self.tall == 1 else 1
        for low in range(first, last, step):
            high = min(low + step, last)
            rows = raw[self.rows_of(low)[0] - begin : self.rows_of(high - 1)[1] - begin]
            if self.tall == 1:
                rows = rows & magnitude
            else:  # there is one row of scales in a step
                parts = (rows[at : at + several] & magnitude for at in range(0, len(rows), several))
                rows = reduce(np.maximum, (part.max(0, keepdims=True) for part in parts))
            if self.columns % self.wide:
                rows = np.pad(rows, ((0, 0), (0, -self.columns % self.wide)))
            out[low - first : high - first] = rows.reshape(len(rows), -1, self.wide).max(2)
        return out


def small_floats(exponent_bits: int, mantissa_bits: int, bias: int, special: str = "") -> Floats:
    """The float32 values of all codes of a float with a sign; `special` says which codes are no numbers."""
    codes = np.arange(2 << (exponent_bits + mantissa_bits))
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = codes & ((1 << mantissa_bits) - 1)
    whole = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa).astype(np.float32)
    values = np.ldexp(whole, np.maximum(exponent, 1) - bias - mantissa_bits)
    values = np.where(codes >= len(codes) // 2, -values, values)
    if special == "fn":
        values[[0x7F, 0xFF]] = np.nan
    elif special == "fnuz":
        values[0x80] = np.nan
    elif special == "ieee":
        top = exponent == (1 << exponent_bits) - 1
        values[top] = np.where(mantissa[top], np.nan, np.copysign(np.inf, values[top]))
    floats: Floats = values.astype(np.float32)
    return floats


def nearest_codes(values: Floats) -> Floats:
    """The code of the value that is nearest to a float32, for each upper half of its bits.

    The last bit of an upper half is set where the lower half has any, so that nothing is rounded twice. Between two
    values the even code counts; what is too large becomes the largest, and what is no number the last code of its sign.
    `values` are those of all codes, as `small_floats` gives them.
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
    """The code of each float32 value by a table of `nearest_codes`."""
    bits = values.view(np.uint32)
    keys = bits & 0xFFFF
    keys += 0xFFFF  # carries into the upper half where the lower one is not zero
    keys |= bits
    keys >>= 16
    return table.take(keys.astype(np.intp))
