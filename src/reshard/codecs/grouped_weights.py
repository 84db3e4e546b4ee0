"""Weights of 2 to 8 bits in groups, each with a scale and a zero point, as AutoAWQ, AutoGPTQ and auto-round pack them.

An element is `dtype(float32(value - zero) · float32(scale))`, which in float16 is what `dequantize_gemm` of AutoAWQ
0.2.9 and the layers of auto-round 0.16 compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from reshard.algebra.dtypes import DType, castable, dtype
from reshard.algebra.tensors import MIN_READ_ELEMENTS, Computed, InputReader, Tensor
from reshard.algebra.views import View
from reshard.base.errors import ReshardError
from reshard.codecs.block_grid import Floats
from reshard.transfer.elements import CAST_BYTES_EACH, RAW_DTYPES, as_float

FLOAT32 = dtype("float32")
_INTERLEAVED = np.array([0, 4, 1, 5, 2, 6, 3, 7], np.uint32)
"""The places of eight neighbours in an item, as AutoAWQ's kernels need them."""


class Packing(NamedTuple):
    """How `qweight` [in, out] packs its values.

    With `by_rows`, an item has values of a column, otherwise of a row. Zero points are packed along rows, and stored
    minus `less`. Values are in order, or eight of 4 bits each are `interleaved`.
    """

    by_rows: bool
    less: int
    interleaved: bool = False


_PACKINGS = {
    ("awq", "gemm"): Packing(by_rows=False, less=0, interleaved=True),
    ("gptq", "gptq"): Packing(by_rows=True, less=1),
    ("gptq", "gptq_v2"): Packing(by_rows=True, less=0),
    ("auto-round", "auto_round:auto_gptq"): Packing(by_rows=True, less=1),
    ("auto-round", "auto_round"): Packing(by_rows=True, less=0),
    ("auto-round", "auto_round:gptqmodel"): Packing(by_rows=True, less=0),
    ("auto-round", "auto_round:auto_awq"): Packing(by_rows=False, less=0, interleaved=True),
}
"""Packings by `quant_method` and the layout version in `quantization_config`."""

_VERSIONS = {
    "awq": ("version", "gemm"),
    "gptq": ("checkpoint_format", "gptq"),
    "auto-round": ("packing_format", ""),
}
"""The setting that names the version, and its default."""

_BITS = range(2, 9)


def packing_of(settings: Mapping[str, Any]) -> Packing | None:
    """How weights with these settings are packed; None unless it is known."""
    method = str(settings.get("quant_method"))
    key, default = _VERSIONS.get(method, ("", ""))
    packing = _PACKINGS.get((method, str(settings.get(key, default)).lower()))
    bits = settings.get("bits") or settings.get("w_bit")
    if packing is None or (packing.interleaved and bits != 4) or bits not in _BITS:
        return None
    return packing


class BitPacking(NamedTuple):
    """Values of some bits each in items of 32: `each` values are in `items` items, beginning at the lowest bit."""

    bits: int
    interleaved: bool = False

    @property
    def items(self) -> int:
        return self.bits if 32 % self.bits else 1

    @property
    def each(self) -> int:
        return 32 * self.items // self.bits

    def values(self, raw: Floats) -> Floats:
        """The values [..., each] in items [..., items]."""
        at = np.arange(0, 32 * self.items, self.bits, dtype=np.uint32)
        at = at[_INTERLEAVED] if self.interleaved else at
        if self.items > 1:  # a value may begin in one item and end in the next
            pairs = raw.astype(np.uint64)
            pairs[..., :-1] |= pairs[..., 1:] << np.uint64(32)
            raw = pairs[..., at // 32]
        values: Floats = (raw >> (at % 32).astype(raw.dtype) & ((1 << self.bits) - 1)).astype(np.uint32)
        return values


class GroupedWeight(Computed):
    """A weight [in, out]. `inputs` are values, zero points, scales and, optionally, the group of each row."""

    def __init__(
        self, packing: Packing, bits: BitPacking, size: int, inputs: tuple[Tensor, ...], wanted: DType
    ) -> None:
        self.dtype, self.inputs = wanted, inputs
        self._packing, self._bits, self._size = packing, bits, size
        self._columns = inputs[2].shape[1]

    def values(self, begin: int, end: int, read: InputReader) -> Floats:
        first, last = begin // self._columns, -(-end // self._columns)
        out = self._computed(first, last, 0, self._columns, read).reshape(-1)
        return out[begin - first * self._columns : end - first * self._columns]

    @property
    def few(self) -> int:
        return max(MIN_READ_ELEMENTS, self._bits.each * self._columns)

    def memory_for(self, count: int) -> int:
        return self._memory_for_rows(count // self._columns + 2, self._columns)

    def memory_for_runs(self, count: int, step: int, length: int) -> int:
        each = self._bits.each
        if step != self._columns or length + 2 * each > step:
            return super().memory_for_runs(count, step, length)
        return self._memory_for_rows(count, length + 2 * each) + count * length * self.dtype.itemsize

    def _memory_for_rows(self, rows: int, columns: int) -> int:
        groups, rows = self.inputs[2].shape[0], rows + 2 * self._bits.each * self._packing.by_rows
        used = groups if len(self.inputs) > 3 else min(groups, rows // self._size + 2)
        wide = 16 if self._bits.items > 1 else 0
        return rows * (columns * (12 + wide + CAST_BYTES_EACH) + 24) + used * columns * (32 + wide)

    def runs(self, begin: int, count: int, step: int, length: int, read: InputReader) -> Floats:
        first, low = divmod(begin, self._columns)
        if step != self._columns or low + length > step:
            return super().runs(begin, count, step, length, read)
        each = self._bits.each
        start, stop = low // each * each, -(-(low + length) // each) * each
        out = self._computed(first, first + count, start, stop, read)
        return out[:, low - start : low - start + length].flatten()

    def _computed(self, first: int, last: int, start: int, stop: int, read: InputReader) -> Floats:
        """Raw elements of rows `first` to `last`, in columns `start` to `stop`, which are multiples of an item."""
        qweight, qzeros, scales = self.inputs[:3]
        each, count = self._bits.each, self._bits.items
        items = slice(start // each * count, stop // each * count)
        if self._packing.by_rows:
            rows = slice(first // each, -(-last // each))
            raw = _read(qweight, slice(rows.start * count, rows.stop * count), slice(start, stop), read)
            units = raw.reshape(-1, count, stop - start).transpose(0, 2, 1)
            values = self._bits.values(units).transpose(0, 2, 1).reshape(-1, stop - start)
            values = values[first - rows.start * each : last - rows.start * each]
        else:
            values = self._along_rows(_read(qweight, slice(first, last), items, read))
        groups = self._groups(first, last, read)
        used = slice(int(groups.min()), int(groups.max()) + 1)
        zeros = self._along_rows(_read(qzeros, used, items, read)) + np.uint32(self._packing.less)
        factors = as_float(_read(scales, used, slice(start, stop), read), scales.dtype).astype(np.float32)
        groups -= used.start
        floats = values.astype(np.float32) - zeros.astype(np.float32)[groups]
        floats *= factors[groups]
        return read.cast(floats.view(np.uint32), FLOAT32, self.dtype).astype(
            RAW_DTYPES[self.dtype.itemsize], copy=False
        )

    def _along_rows(self, raw: Floats) -> Floats:
        return self._bits.values(raw.reshape(len(raw), -1, self._bits.items)).reshape(len(raw), -1)

    def _groups(self, first: int, last: int, read: InputReader) -> Floats:
        """The group of each row."""
        if len(self.inputs) > 3:
            groups: Floats = read(self.inputs[3], first, last).astype(np.int64)
            if groups.max() >= self.inputs[2].shape[0]:
                raise no_such_group(self.inputs[3], self.inputs[2].shape[0])
            return groups
        return np.arange(first, last) // self._size


def no_such_group(g_idx: Tensor, groups: int) -> ReshardError:
    """The error for a `g_idx` with numbers of groups that do not exist."""
    return ReshardError(
        "gptq-group-without-scale",
        "g_idx names a group that has no scale",
        file=g_idx.file,
        expected=f"numbers from 0 to {groups - 1}",
        remedy="the file is damaged: copy or download it again",
    )


def _read(tensor: Tensor, rows: slice, columns: slice, read: InputReader) -> Floats:
    part = Tensor(tensor.dtype, tensor.view[rows, columns])
    return read(part, 0, part.view.numel).reshape(part.shape)


def grouped(
    packing: Packing,
    bits: int,
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None,
    wanted: DType,
) -> Tensor | None:
    """The weight [out, in] of a linear layer; None if its parts do not match each other."""
    if not len(qweight.shape) == len(qzeros.shape) == len(scales.shape) == 2 or not castable(scales.dtype):
        return None
    if bits not in ((4,) if packing.interleaved else _BITS):
        return None
    (groups, columns), how = scales.shape, BitPacking(bits, packing.interleaved)
    each, items, width = how.each, how.items, columns // how.each * how.items
    rows = qweight.shape[0] // items * each if packing.by_rows else qweight.shape[0]
    along = (rows // each * items, columns) if packing.by_rows else (rows, width)
    fits = groups and rows % groups == 0 and columns % each == 0
    if not fits or qweight.shape != along or qzeros.shape != (groups, width):
        return None
    if g_idx and (g_idx.shape != (rows,) or g_idx.dtype.name != "int32"):
        return None
    inputs = (qweight, qzeros, scales, *([g_idx] if g_idx else []))
    source = GroupedWeight(packing, how, rows // groups, inputs, wanted)
    return Tensor(wanted, View.of(source, rows, columns).permute(1, 0))
