"""Plain weights of values and scales, in FP8, FP6, MXFP4, NVFP4, int8 and int4, computed when they are read.

An element is `dtype(float32(value) · float32(scale of its block))`, rounded once. That is what transformers 5.23 does
(`Fp8Dequantize` in integrations/finegrained_fp8.py, `convert_moe_packed_tensors` in integrations/mxfp4.py) and what
DeepSeek publishes (inference/kernel.py of DeepSeek-V3), and `dequantize` of compressed-tensors 0.20 if scales have
the requested dtype. The scale of a block of NVFP4 is itself computed in float32: `scale · weight_scale_2` as in
`NVFP4QTensor` of ModelOpt 0.47, or `scale / weight_global_scale` as in compressed-tensors. FP8 of ModelOpt has its
scale rounded to the dtype first, as in `FP8QTensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, lcm
from typing import NamedTuple

import numpy as np

from reshard.algebra.dtypes import DType, dtype
from reshard.algebra.tensors import MIN_READ_ELEMENTS, Computed, InputReader, Tensor
from reshard.codecs.block_grid import BlockGrid, Floats, small_floats
from reshard.codecs.byte_values import rows_of
from reshard.codecs.grouped_weights import no_such_group
from reshard.transfer.elements import CAST_BYTES_EACH, RAW_DTYPES, as_float

FLOAT32 = dtype("float32")

BLOCK_ELEMENTS = 1 << 17
"""Elements computed at a time: their float32 values fit in the cache of a core."""

POWERS = (np.arange(256, dtype=np.uint32) << 23).view(np.float32)  # powers of two, from 2^-126 to infinity
POWERS[0] = 2.0**-127
_E4M3 = small_floats(4, 3, 7, "fn")
"""Scales stored as exponents: 2^(s - 127)."""


class WeightKind(NamedTuple):
    """What weights with the same scheme, dtype and settings have in common.

    `table` has the values of each byte, or of 12 bits. The scale of the complete weight, if it has one, is `applied`
    to those of its blocks. Scales are `rounded` to the dtype of the weight before they are used, or not.
    """

    table: Floats
    applied: Callable[[Floats, Floats], Floats] | None = None
    rounded: bool = False


@dataclass(frozen=True)
class WeightArithmetic:
    """What weights of one shape have in common.

    `shape` is [..., rows, columns], with a scale for each of its `blocks`. A row has `items` items of packed values;
    `table` maps bytes to their values. `packed`, `scales` and `dtype` are the dtypes of values, scales and weights.
    If the weights are `reordered`, another input names the group of each column; `kind` may require another scale. If
    they are `smoothed`, the last input has a factor for each column, by which the rounded weight is multiplied.
    """

    shape: tuple[int, ...]
    blocks: BlockGrid
    items: int
    kind: WeightKind
    packed: DType
    scales: DType
    dtype: DType
    reordered: bool = False
    smoothed: bool = False

    @cached_property
    def table(self) -> Floats:
        """The values of each row of the kind's table, as one item."""
        table = self.kind.table
        items: Floats = table.view(f"u{4 * table.shape[1]}")[:, 0]
        return items

    def memory_for(self, count: int) -> int:
        """Bytes needed to compute `count` elements."""
        columns = self.blocks.columns
        return self.memory_for_rows(count // columns + 2, columns) + count * self.dtype.itemsize

    def memory_for_rows(self, rows: int, columns: int) -> int:
        """Bytes needed to compute parts of some rows, without the result."""
        blocks = self.blocks
        read = rows * (columns * self.items // blocks.columns + 1) * self.packed.itemsize
        read += blocks.scales_of(rows) * blocks.across * (self.scales.itemsize + 20)
        step = max(BLOCK_ELEMENTS, columns) * (12 + CAST_BYTES_EACH)
        if self.reordered or self.smoothed:
            step += max(BLOCK_ELEMENTS, columns) * 8 + blocks.columns * 20
        return read + rows * (columns * self.dtype.itemsize + 24) + step

    @cached_property
    def least_memory(self) -> int:
        """The value of `DequantizedWeight.least_memory` for each weight."""
        return self.memory_for(MIN_READ_ELEMENTS)


class DequantizedWeight(Computed):
    """A weight [..., rows, columns] of `packed` values, each times the scale of its block.

    `more` are the groups of columns [columns], if these are not in order, or the scale of the complete weight, if there
    is one, and the factors of columns [columns], if there are such.
    """

    def __init__(
        self, packed: Tensor, scales: Tensor, arithmetic: WeightArithmetic, more: Sequence[Tensor] = ()
    ) -> None:
        self.inputs = (packed, scales, *more)
        self.dtype = arithmetic.dtype
        self._arithmetic, self._blocks, self._items = arithmetic, arithmetic.blocks, arithmetic.items

    def values(self, begin: int, end: int, read: InputReader) -> Floats:
        columns = self._blocks.columns
        first, last = begin // columns, -(-end // columns)
        packed = read(self.inputs[0], first * self._items, last * self._items)
        out = self._computed(packed, first, last, slice(0, columns), read)
        return out.reshape(-1)[begin - first * columns : end - first * columns]

    def memory_for(self, count: int) -> int:
        return self._arithmetic.memory_for(count)

    @property
    def least_memory(self) -> int:  # the inputs are stored and need no memory to compute
        return self._arithmetic.least_memory

    def memory_for_runs(self, count: int, step: int, length: int) -> int:
        columns, unit = self._blocks.columns, self._unit
        if step != columns or length + 2 * unit > columns:
            return super().memory_for_runs(count, step, length)
        return (
            self._arithmetic.memory_for_rows(count, length + 2 * unit) + count * length * self.dtype.itemsize
        )

    @property
    def _unit(self) -> int:
        """The smallest number of columns that can be computed separately: complete blocks of complete items."""
        columns = self._blocks.columns
        return lcm(self._blocks.wide, columns // gcd(columns, self._items))

    def runs(self, begin: int, count: int, step: int, length: int, read: InputReader) -> Floats:
        """Some columns, as a row-parallel rank needs them: only the blocks that contain them are computed."""
        first, low = divmod(begin, self._blocks.columns)
        packed, unit, items = self.inputs[0], self._unit, self._items
        start, stop = low // unit * unit, min(-(-(low + length) // unit) * unit, step)
        if (
            step != self._blocks.columns
            or low + length > step
            or len(packed.shape) != 2
            or stop - start == step
        ):
            return super().runs(begin, count, step, length, read)
        part = packed.view[first : first + count, start * items // step : -(-stop * items // step)]
        raw = read(Tensor(packed.dtype, part), 0, part.numel)
        out = self._computed(raw, first, first + count, slice(start, stop), read)
        return out[:, low - start : low - start + length].flatten()

    def _computed(self, packed: Floats, first: int, last: int, columns: slice, read: InputReader) -> Floats:
        """Raw elements of rows `first` to `last` in complete blocks of columns; `packed` has their values."""
        packed = packed.view(np.uint8).reshape(last - first, -1)
        index = self._blocks.of_rows(first, last)
        scales = self._scales(int(index[0]), int(index[-1]) + 1, read)
        groups = self._groups(columns, read)
        if groups is None:
            wide = self._blocks.wide
            scales = scales[:, columns.start // wide : -(-columns.stop // wide)]
        index -= index[0]
        out = np.empty((last - first, columns.stop - columns.start), RAW_DTYPES[self.dtype.itemsize])
        step = max(1, BLOCK_ELEMENTS // out.shape[1])
        for low in range(0, last - first, step):
            part = slice(low, low + step)
            rows = rows_of(self._arithmetic.kind.table, packed[part])
            values = np.take(self._arithmetic.table, rows).view(np.float32)
            with np.errstate(over="ignore", invalid="ignore"):  # reported by name as NaN or Inf
                if groups is None:
                    self._blocks.multiply(values, scales[index[part]])
                else:
                    values *= scales[index[part]][:, groups]
            out[part] = read.cast(values.view(np.uint32), FLOAT32, self.dtype)
            if self._arithmetic.smoothed:
                out[part] = self._smoothed(out[part], columns, read)
        return out

    def _smoothed(self, raw: Floats, columns: slice, read: InputReader) -> Floats:
        """Raw elements times the factors of their columns, as `disable_pre_quant_scale_and_resmooth` of ModelOpt."""
        factors, values = self.inputs[-1], as_float(raw, self.dtype).astype(np.float32)
        values *= _floats(read(factors, columns.start, columns.stop), factors.dtype)
        return read.cast(values.view(np.uint32), FLOAT32, self.dtype)

    def _groups(self, columns: slice, read: InputReader) -> Floats | None:
        """The group of each of these columns; None if columns are in order, which -1 says, too."""
        if not self._arithmetic.reordered:
            return None
        raw = read(self.inputs[2], 0, self._blocks.columns)
        groups: Floats = raw.view(f"i{raw.itemsize}").astype(np.int64)
        if (groups == -1).any():
            groups = np.arange(self._blocks.columns) // self._blocks.wide
        if groups.min() < 0 or groups.max() >= self._blocks.across:
            raise no_such_group(self.inputs[2], self._blocks.across)
        return groups[columns]

    def _scales(self, first: int, last: int, read: InputReader) -> Floats:
        """The rows of scales `first` to `last`."""
        tensor, across, kind = self.inputs[1], self._blocks.across, self._arithmetic.kind
        scales = _floats(read(tensor, first * across, last * across), tensor.dtype).reshape(-1, across)
        if kind.applied:
            outer = _floats(read(self.inputs[2], 0, 1), self.inputs[2].dtype)
            with np.errstate(all="ignore"):  # reported by name as NaN or Inf
                return kind.applied(scales, outer)
        if kind.rounded:
            raw = read.cast(np.ascontiguousarray(scales).view(np.uint32), FLOAT32, self.dtype)
            return as_float(raw, self.dtype).astype(np.float32, copy=False)
        return scales


def _floats(raw: Floats, stored: DType) -> Floats:
    """Scales as float32."""
    if stored.name in ("uint8", "float8_e8m0fnu"):
        powers = np.take(POWERS, raw)
        return np.where(raw == 0xFF, np.float32(np.nan), powers) if stored.name != "uint8" else powers
    if stored.name == "float8_e4m3fn":
        return np.take(_E4M3, raw)
    return as_float(raw, stored).astype(np.float32, copy=False)
