"""The values that the bytes of a quantized weight store: tables by the dtype of its items.

A table is [256, values in a byte], or [4096, 2]: the two values of 6 bits in each half of three bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from reshard.codecs.block_grid import Floats, small_floats

ByteValues = Mapping[str, Floats]


def _halves(values: Floats) -> Floats:
    """The two values that two codes stand for, out of all possible values; the code in the low bits comes first."""
    return np.stack([np.tile(values, len(values)), np.repeat(values, len(values))], 1)


def rows_of(table: Floats, packed: Floats) -> Floats:
    """The rows of a table for each row of bytes [rows, bytes]."""
    if len(table) == 256:
        return packed
    first, second, third = (packed[:, at::3].astype(np.uint16) for at in range(3))
    pairs = np.stack([first | (second & 15) << 8, second >> 4 | third << 4], 2)
    rows: Floats = pairs.reshape(len(packed), -1)
    return rows


def values_in(table: Floats, size: int) -> int:
    """The number of values in this many bytes."""
    return size * 8 * int(table.shape[1]) // (len(table).bit_length() - 1)


_FP4 = small_floats(2, 1, 1)
FP8: ByteValues = {
    "float8_e4m3fn": small_floats(4, 3, 7, "fn").reshape(256, 1),
    "float8_e5m2": small_floats(5, 2, 15, "ieee").reshape(256, 1),
    "float8_e4m3fnuz": small_floats(4, 3, 8, "fnuz").reshape(256, 1),
    "float8_e5m2fnuz": small_floats(5, 2, 16, "fnuz").reshape(256, 1),
}
FP4: ByteValues = dict.fromkeys(("uint8", "int8"), _halves(_FP4))
FP6: ByteValues = {"uint8": _halves(small_floats(2, 3, 1))}
MODELOPT_FP4: ByteValues = {"uint8": _halves(_FP4 + np.float32(0))}
"""-0 becomes 0."""
INT4: ByteValues = {"int32": _halves(np.arange(-8, 8, dtype=np.float32))}
INT8: ByteValues = {"int8": np.arange(256).astype(np.int8).astype(np.float32).reshape(256, 1)}
