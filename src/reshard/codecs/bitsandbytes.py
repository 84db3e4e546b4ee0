"""Weights that bitsandbytes quantized: 4 bits that index a table, or 8 bits with a scale per row.

The arithmetic is that of bitsandbytes 0.50 on a CPU (`dequantize_4bit`, `int8_vectorwise_dequant`), in float32, and
rounded once.
"""

from __future__ import annotations

import numpy as np

from reshard.algebra.dtypes import DType, dtype
from reshard.algebra.tensors import Computed, InputReader, Tensor
from reshard.codecs.block_grid import Floats
from reshard.transfer.elements import CAST_BYTES_EACH

FLOAT32 = dtype("float32")
RECIPROCAL_OF_127 = np.float32(7.874015718698502e-3)


class LookedUpWeight(Computed):
    """A flat weight of 4 bits, the high half of a byte first: a table entry times the scale of its block.

    `inputs` are the values, `absmax` of each block of `size` values, and the table; if `absmax` is quantized as well,
    its own absmax and table follow, with blocks of `nested` and an offset.
    """

    def __init__(
        self, inputs: tuple[Tensor, ...], size: int, nested: int, offset: float, wanted: DType
    ) -> None:
        self.dtype, self.inputs = wanted, inputs
        self._size, self._nested, self._offset = size, nested, np.float32(offset)

    def values(self, begin: int, end: int, read: InputReader) -> Floats:
        packed, _, table = self.inputs[:3]
        each = 2 * packed.dtype.itemsize
        first, last = begin // each, -(-end // each)
        entries = read(table, 0, 16).view(np.float32)
        pairs = np.stack([np.repeat(entries, 16), np.tile(entries, 16)], 1).view(np.uint64)[:, 0]
        floats = np.take(pairs, read(packed, first, last).view(np.uint8)).view(np.float32)
        floats = floats[begin - first * each : end - first * each]
        low, high = begin // self._size, -(-end // self._size)
        scales = np.repeat(self._scales(low, high, read), self._size)
        floats *= scales[begin - low * self._size : end - low * self._size]
        return read.cast(floats.view(np.uint32), FLOAT32, self.dtype)

    def memory_for(self, count: int) -> int:
        return count * (12 + CAST_BYTES_EACH) + (self._size + self._nested) * 24 + (1 << 14)

    def _scales(self, low: int, high: int, read: InputReader) -> Floats:
        raw = read(self.inputs[1], low, high)
        if not self._nested:
            scales: Floats = raw.view(np.float32)
            return scales
        table = read(self.inputs[4], 0, 256).view(np.float32)
        first, last = low // self._nested, -(-high // self._nested)
        outer = np.repeat(read(self.inputs[3], first, last).view(np.float32), self._nested)
        outer = outer[low - first * self._nested : high - first * self._nested]
        nested: Floats = table[raw] * outer + self._offset
        return nested


class RowwiseWeight(Computed):
    """A weight [rows, columns] of int8: each value times the largest magnitude of its row, divided by 127."""

    def __init__(self, packed: Tensor, largest: Tensor, wanted: DType) -> None:
        self.dtype, self.inputs = wanted, (packed, largest)

    def memory_for(self, count: int) -> int:
        return count * (12 + CAST_BYTES_EACH) + 16 * self.inputs[0].shape[1]

    def values(self, begin: int, end: int, read: InputReader) -> Floats:
        packed, largest = self.inputs
        columns = packed.shape[1]
        first, last = begin // columns, -(-end // columns)
        scales = np.repeat(read(largest, first, last).view(np.float32), columns)
        floats = read(packed, begin, end).view(np.int8).astype(np.float32)
        floats *= scales[begin - first * columns : end - first * columns]
        floats *= RECIPROCAL_OF_127
        return read.cast(floats.view(np.uint32), FLOAT32, self.dtype)
