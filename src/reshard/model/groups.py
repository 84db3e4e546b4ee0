"""4-bit weights in groups, each with a scale and a zero point, as AutoAWQ and AutoGPTQ pack them.

An element is `dtype(float32(value - zero) · float32(scale))`, which in float16 is what `dequantize_gemm` of AutoAWQ
0.2.9 and the layers of auto-round 0.16 compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from reshard.algebra.dtypes import DType, dtype
from reshard.algebra.tensors import FEW, Computed, Read, Tensor
from reshard.algebra.views import View
from reshard.base.errors import ReshardError
from reshard.model.blocks import Floats
from reshard.transfer.elements import CAST, RAW, as_float, castable

FLOAT32 = dtype("float32")
EACH = 8
"""Values in a 32-bit item."""

_IN_ORDER = np.arange(0, 32, 4, dtype=np.uint32)
_INTERLEAVED = _IN_ORDER[[0, 4, 1, 5, 2, 6, 3, 7]]
"""The shift in bits of each of eight neighbours: in order, and interleaved as AutoAWQ's kernels need it."""


class Packing(NamedTuple):
    """How `qweight` [in, out] packs its values.

    With `by_rows`, an item has eight values of a column, otherwise eight of a row, shifted by `shifts`. Zero points are
    packed along rows, and stored minus `less`.
    """

    by_rows: bool
    shifts: Floats
    less: int


_PACKINGS = {
    ("awq", "gemm"): Packing(False, _INTERLEAVED, 0),
    ("gptq", "gptq"): Packing(True, _IN_ORDER, 1),
    ("gptq", "gptq_v2"): Packing(True, _IN_ORDER, 0),
}
"""Packings by `quant_method` and the layout version in `quantization_config`."""


def packing_of(settings: Mapping[str, Any]) -> Packing | None:
    """How weights with these settings are packed; None unless it is a known packing of eight 4-bit values."""
    method = settings.get("quant_method")
    version = (
        settings.get("version", "gemm") if method == "awq" else settings.get("checkpoint_format", "gptq")
    )
    bits = settings.get("bits") or settings.get("w_bit")
    return _PACKINGS.get((str(method), str(version).lower())) if bits == 4 else None


class Grouped(Computed):
    """A 4-bit weight [in, out]. `inputs` are values, zero points, scales and, optionally, the group of each row."""

    def __init__(self, packing: Packing, size: int, inputs: tuple[Tensor, ...], wanted: DType) -> None:
        self.dtype, self.inputs = wanted, inputs
        self._packing, self._size = packing, size
        self._columns = inputs[2].shape[1]

    def values(self, begin: int, end: int, read: Read) -> Floats:
        first, last = begin // self._columns, -(-end // self._columns)
        out = self._computed(first, last, 0, self._columns, read).reshape(-1)
        return out[begin - first * self._columns : end - first * self._columns]

    @property
    def few(self) -> int:
        return max(FEW, EACH * self._columns)

    def room(self, count: int) -> int:
        return self._room(count // self._columns + 2, self._columns)

    def room_of_runs(self, count: int, step: int, length: int) -> int:
        if step != self._columns or length + 2 * EACH > step:
            return super().room_of_runs(count, step, length)
        return self._room(count, length + 2 * EACH) + count * length * self.dtype.itemsize

    def _room(self, rows: int, columns: int) -> int:
        groups, rows = self.inputs[2].shape[0], rows + 2 * EACH * self._packing.by_rows
        used = groups if len(self.inputs) > 3 else min(groups, rows // self._size + 2)
        return rows * (columns * (12 + CAST) + 24) + used * columns * 32

    def runs(self, begin: int, count: int, step: int, length: int, read: Read) -> Floats:
        first, low = divmod(begin, self._columns)
        if step != self._columns or low + length > step:
            return super().runs(begin, count, step, length, read)
        start, stop = low // EACH * EACH, -(-(low + length) // EACH) * EACH
        out = self._computed(first, first + count, start, stop, read)
        return out[:, low - start : low - start + length].flatten()

    def _computed(self, first: int, last: int, start: int, stop: int, read: Read) -> Floats:
        """Raw elements of rows `first` to `last`, in columns `start` to `stop`, which are multiples of an item."""
        qweight, qzeros, scales = self.inputs[:3]
        items = slice(start // EACH, stop // EACH)
        if self._packing.by_rows:
            rows = slice(first // EACH, -(-last // EACH))
            raw = _read(qweight, rows, slice(start, stop), read)
            values = (raw[:, None] >> self._packing.shifts[:, None] & 15).reshape(-1, stop - start)
            values = values[first - rows.start * EACH : last - rows.start * EACH]
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
            RAW[self.dtype.itemsize], copy=False
        )

    def _along_rows(self, raw: Floats) -> Floats:
        values: Floats = (raw[:, :, None] >> self._packing.shifts & 15).reshape(len(raw), -1)
        return values

    def _groups(self, first: int, last: int, read: Read) -> Floats:
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


def _read(tensor: Tensor, rows: slice, columns: slice, read: Read) -> Floats:
    part = Tensor(tensor.dtype, tensor.view[rows, columns])
    return read(part, 0, part.view.numel).reshape(part.shape)


def grouped(
    packing: Packing,
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None,
    wanted: DType,
) -> Tensor | None:
    """The weight [out, in] of a linear layer; None if its parts do not match each other."""
    if not len(qweight.shape) == len(qzeros.shape) == len(scales.shape) == 2 or not castable(scales.dtype):
        return None
    groups, columns = scales.shape
    rows = qweight.shape[0] * EACH if packing.by_rows else qweight.shape[0]
    width = columns if packing.by_rows else columns // EACH
    fits = groups and rows % groups == 0 and columns % EACH == 0
    if not fits or qweight.shape[1] != width or qzeros.shape != (groups, columns // EACH):
        return None
    if g_idx and (g_idx.shape != (rows,) or g_idx.dtype.name != "int32"):
        return None
    inputs = (qweight, qzeros, scales, *([g_idx] if g_idx else []))
    source = Grouped(packing, rows // groups, inputs, wanted)
    return Tensor(wanted, View.of(source, rows, columns).permute(1, 0))
