"""The values that each byte of a quantized weight stores: tables [256, values in a byte] by the dtype of its items."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from reshard.codecs.block_grid import Floats, small_floats

ByteValues = Mapping[str, Floats]


def _halves(values: Floats) -> Floats:
    """The two values [256, 2] in each byte, out of the 16 possible 4-bit values; the low half of a byte comes first."""
    return np.stack([np.tile(values, 16), np.repeat(values, 16)], 1)


_FP4 = small_floats(2, 1, 1)
FP8: ByteValues = {
    "float8_e4m3fn": small_floats(4, 3, 7, "fn").reshape(256, 1),
    "float8_e5m2": small_floats(5, 2, 15, "ieee").reshape(256, 1),
    "float8_e4m3fnuz": small_floats(4, 3, 8, "fnuz").reshape(256, 1),
    "float8_e5m2fnuz": small_floats(5, 2, 16, "fnuz").reshape(256, 1),
}
FP4: ByteValues = dict.fromkeys(("uint8", "int8"), _halves(_FP4))
MODELOPT_FP4: ByteValues = {"uint8": _halves(_FP4 + np.float32(0))}
"""-0 becomes 0."""
INT4: ByteValues = {"int32": _halves(np.arange(-8, 8, dtype=np.float32))}
INT8: ByteValues = {"int8": np.arange(256).astype(np.int8).astype(np.float32).reshape(256, 1)}
