"""The weighted sum of one tensor of several checkpoints, computed element by element when it is read.

Sums are those of torch on a CPU with fused multiply-add, and of Megatron-LM's tools/checkpoint/weighted_merge.py, bit
for bit: from zeros, `total.add_(tensor, alpha=weight)` in float32, in the order of the checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reshard.algebra.dtypes import dtype
from reshard.algebra.tensors import Computed, InputReader, Tensor
from reshard.algebra.views import View
from reshard.transfer.elements import CAST_BYTES_EACH

FLOAT32, FLOAT64 = dtype("float32"), dtype("float64")

BLOCK_ELEMENTS = 1 << 14
"""Elements added at a time: their float64 values fit in the cache of a core."""

BLOCK_BYTES_EACH = 40
"""Most bytes of each element of a block, besides those of its cast."""

Floats = np.ndarray[Any, Any]


class AveragedTensor(Computed):
    """The sum of `tensors`, each times its weight in float32, rounded to float32 after each addition."""

    dtype = FLOAT32

    def __init__(self, tensors: Sequence[Tensor], weights: Sequence[float]) -> None:
        self.inputs = tuple(Tensor(FLOAT32, tensor.view) for tensor in tensors)
        self._weights = [np.float64(np.float32(weight)) for weight in weights]

    def memory_for(self, count: int) -> int:
        return 2 * count * FLOAT32.itemsize + min(count, BLOCK_ELEMENTS) * (
            BLOCK_BYTES_EACH + CAST_BYTES_EACH
        )

    def values(self, begin: int, end: int, read: InputReader) -> Floats:
        return self._summed(self.inputs, begin, end, read)

    def runs(self, begin: int, count: int, step: int, length: int, read: InputReader) -> Floats:
        some = View.of(None, count, length, start=begin, strides=(step, 1))
        inputs = [Tensor(FLOAT32, some.through(lambda _, view=each.view: view)) for each in self.inputs]  # type: ignore[misc]
        return self._summed(inputs, 0, count * length, read)

    def memory_for_runs(self, count: int, step: int, length: int) -> int:
        return self.memory_for(count * length)

    def _summed(self, inputs: Sequence[Tensor], begin: int, end: int, read: InputReader) -> Floats:
        total = np.zeros(end - begin, np.float32)
        for tensor, weight in zip(inputs, self._weights, strict=True):
            values = read(tensor, begin, end).view(np.float32)
            for low in range(0, len(total), BLOCK_ELEMENTS):
                block = slice(low, low + BLOCK_ELEMENTS)
                exact = fused_multiply_add(total[block], values[block], weight)
                total[block] = read.cast(exact.view(np.uint64), FLOAT64, FLOAT32).view(np.float32)
        raw: Floats = total.view(np.uint32)
        return raw


def fused_multiply_add(total: Floats, values: Floats, weight: np.float64) -> Floats:
    """`total + values * weight` in float64, which rounds to the same float32 as the exact sum.

    The product is exact. A sum that was rounded to the middle between two float32 is moved towards the exact one.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        product = np.multiply(values, weight, dtype=np.float64)
        sums: Floats = product + total
        (middle,) = np.nonzero(sums.view(np.uint64) & _BELOW == _HALF)
        halfway, added, before = sums[middle], product[middle], total[middle].astype(np.float64)
        part = halfway - before
        rest = (before - (halfway - part)) + (added - part)
        sums[middle] = np.where(rest, np.nextafter(halfway, np.copysign(np.inf, rest)), halfway)
    return sums


_BELOW, _HALF = np.uint64((1 << 29) - 1), np.uint64(1 << 28)
"""The bits of a float64 that a float32 lacks, and their value in the middle between two float32."""
