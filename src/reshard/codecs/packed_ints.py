"""Int4 made of plain weights, in groups of 32 with a scale each, as Kimi-K2.5 stores its experts.

A scale is the largest magnitude over 7, as in the training with fake quantization that such weights come from: every
weight of it can be quantized again without loss. In the dtype of the weight, that quotient may be one step off, so the
scale is the one of three with the least error. Values are then divided, rounded and packed as
`PackedQuantizationCompressor` of compressed-tensors 0.20 does.
"""

from __future__ import annotations

import numpy as np

from reshard.algebra.dtypes import dtype
from reshard.algebra.tensors import Computed, InputReader, Tensor
from reshard.algebra.views import View
from reshard.codecs.block_grid import STEP_ELEMENTS, Floats, raw_floats, rounded_to
from reshard.codecs.encoded_groups import EncodedGroups
from reshard.transfer.elements import as_float

FLOAT32, INT32, INT64 = dtype("float32"), dtype("int32"), dtype("int64")
GROUP = 32
"""Elements that share a scale."""
EACH = 8
"""Values in an item."""
_OF_ZEROS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}
"""The scale of a group of zeros: the step from 1 to the next number."""


class _Int4Part(EncodedGroups):
    """The common base of values and scales."""

    method, step = "int4", STEP_ELEMENTS

    def memory_for(self, count: int) -> int:
        groups = count // self.per_group + 2
        return groups * (GROUP * self.inputs[0].dtype.itemsize + 4 * self.per_group) + STEP_ELEMENTS * 96

    def _scales(self, floats: Floats) -> Floats:
        """The scale of each group [groups, 1]."""
        kind = self.inputs[0].dtype
        best = rounded_to(np.abs(floats).max(1, keepdims=True) / np.float32(7), kind)
        best[best == 0] = _OF_ZEROS[kind.name]
        nearest, least = raw_floats(best, kind), self._error(floats, best)
        for beside in (nearest + 1, nearest - 1):
            scales = as_float(beside, kind).astype(np.float32)
            error = self._error(floats, scales)
            best, least = np.where(error < least, scales, best), np.minimum(error, least)
        return best

    def _error(self, floats: Floats, scales: Floats) -> Floats:
        with np.errstate(all="ignore"):  # next to zero, or to the largest number, there is none
            made = rounded_to(self._numbers(floats, scales) * scales, self.inputs[0].dtype)
            error: Floats = np.abs(made - floats).sum(1, keepdims=True)
        return np.where(np.isfinite(error), error, np.float32(np.inf))

    def _numbers(self, floats: Floats, scales: Floats) -> Floats:
        """The values from -8 to 7."""
        numbers: Floats = np.clip(np.rint(rounded_to(floats / scales, self.inputs[0].dtype)), -8, 7)
        return numbers


class Int4Scales(_Int4Part):
    """The scales of a weight, in its dtype."""

    def __init__(self, name: str, weight: Tensor) -> None:
        super().__init__(name, weight, GROUP)
        self.dtype = weight.dtype

    def _items(self, floats: Floats, read: InputReader) -> Floats:
        return raw_floats(self._scales(floats), self.dtype)


class Int4Values(_Int4Part):
    """The values of a weight, eight in an item."""

    dtype, per_group = INT32, GROUP // EACH

    def _items(self, floats: Floats, read: InputReader) -> Floats:
        codes = (
            (self._numbers(floats, self._scales(floats)) + 8).astype(np.uint32).reshape(len(floats), -1, EACH)
        )
        items: Floats = np.bitwise_or.reduce(codes << np.arange(0, 32, 4, dtype=np.uint32), 2)
        return items


class WeightShape(Computed):
    """The shape of a weight."""

    dtype = INT64

    def __init__(self, weight: Tensor) -> None:
        self.inputs = (weight,)

    def memory_for(self, count: int) -> int:
        return 64 * (count + 1)

    def values(self, begin: int, end: int, read: InputReader) -> Floats:
        return np.array(self.inputs[0].shape, np.uint64)[begin:end]


def packed_ints(name: str, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The values, the scales and the shape that are stored of a weight."""
    weight = weight if weight.dtype.itemsize <= 4 else Tensor(FLOAT32, weight.view)
    *outer, columns = weight.shape
    values, scales, shape = Int4Values(name, weight, GROUP), Int4Scales(name, weight), WeightShape(weight)
    return (
        Tensor(INT32, View.of(values, *outer, columns // EACH)),
        Tensor(weight.dtype, View.of(scales, *outer, columns // GROUP)),
        Tensor(INT64, View.of(shape, len(weight.shape))),
    )
