"""FP8, MXFP4, MXFP6 and MXFP8 made of plain weights: values and scales, computed from the elements block by block.

FP8 as `Fp8Quantize` of transformers 5.23 makes it (integrations/finegrained_fp8.py), in the blocks of 128 × 128 that
DeepSeek publishes; MXFP4 as `downcast_to_mxfp_torch` of triton_kernels 3.5, with which transformers quantizes gpt-oss;
MXFP6 and MXFP8 as compressed-tensors 0.20 (`generate_mx_scales`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from reshard.algebra.dtypes import DType, dtype
from reshard.algebra.tensors import MIN_READ_ELEMENTS, Computed, InputReader, Tensor
from reshard.codecs.block_grid import STEP_ELEMENTS, BlockGrid, Floats, codes_of, nearest_codes, small_floats
from reshard.codecs.not_finite import not_finite
from reshard.transfer.elements import as_float

FLOAT32, BFLOAT16, UINT8 = dtype("float32"), dtype("bfloat16"), dtype("uint8")
E8M0 = dtype("float8_e8m0fnu")

READ_ELEMENTS = 1 << 22
"""Elements read at a time to compute scales: if a source is transposed, one read serves many rows."""


class BlockScales(NamedTuple):
    """The scales of some blocks: as stored, and the factors that scale the weight to the range of the format."""

    stored: Floats
    factors: Floats


class QuantizationMethod(NamedTuple):
    """How values and scales are computed from a weight, and how they are stored.

    `table` rounds (`nearest_codes`) to codes of `bits`, which are packed in bytes of dtype `values`. `scales` computes
    scales from the largest magnitude of each block. A weight is read as `reads`, if that is given, and must be `finite`
    if the format has no code for NaN or Inf.
    """

    table: Floats
    values: DType
    bits: int
    stored: DType
    scales: Callable[[Floats], BlockScales]
    reads: DType | None = None
    finite: bool = False


def _fp8_scales(largest: Floats) -> BlockScales:
    with np.errstate(divide="ignore", invalid="ignore"):
        reciprocals = np.float32(1) / largest  # torch also divides a number by a tensor this way
        factors = np.where(largest > 0, reciprocals * np.float32(448), np.float32(1))
        return BlockScales(np.float32(1) / factors, factors)


def _ue8m0_scales(largest: Floats) -> BlockScales:
    """Powers of two, not below the usual FP8 scale. Infinity is stored as NaN."""
    stored = _fp8_scales(largest).stored
    tiny = np.finfo(np.float32).tiny
    exponents = np.ceil(np.log2(np.maximum(stored, tiny).astype(np.float64)).astype(np.float32))
    powers = np.where(exponents <= 127, np.exp2(np.minimum(exponents, 127)), np.float32(np.nan))
    return BlockScales(powers.astype(np.float32), np.float32(1) / powers.astype(np.float32))


def _e8m0_scales(largest: Floats) -> BlockScales:
    """The same, stored as exponents."""
    powers, factors = _ue8m0_scales(largest)
    return BlockScales((powers.view(np.uint32) >> 23).astype(np.uint8), factors)


def _mx_scales(largest: Floats) -> BlockScales:
    """The exponents of powers of two, not below the largest magnitude over 6. Below 2^-126, scale and values are 0."""
    bits = (largest / np.float32(6)).view(np.uint32)
    exponents = (bits + np.uint32(0x7FFFFF)) >> 23
    powers = (exponents << 23).view(np.float32)
    with np.errstate(divide="ignore"):
        factors = np.where(exponents > 0, np.float32(1) / powers, np.float32(0))
    return BlockScales(exponents.astype(np.uint8), factors)


def _scales_below(step: int, offset: int) -> Callable[[Floats], BlockScales]:
    """Exponents of powers of two, `offset` below that of the largest magnitude to whose bits `step` is added."""

    def scales(largest: Floats) -> BlockScales:
        exponents = ((largest.view(np.uint32) + np.uint32(step)) >> 23).astype(np.int32) - offset
        exponents = np.clip(exponents, 0, 254)
        return BlockScales(exponents.astype(np.uint8), np.ldexp(np.float32(1), 127 - exponents))

    return scales


_E4M3 = nearest_codes(small_floats(4, 3, 7, "fn"))
_E2M1 = nearest_codes(small_floats(2, 1, 1))
_E2M3 = nearest_codes(small_floats(2, 3, 1))
FP8 = QuantizationMethod(_E4M3, dtype("float8_e4m3fn"), 8, FLOAT32, _fp8_scales)
UE8M0 = FP8._replace(scales=_ue8m0_scales)
FP8_E8M0 = UE8M0._replace(stored=E8M0, scales=_e8m0_scales)
MXFP4 = QuantizationMethod(_E2M1, UINT8, 4, UINT8, _mx_scales, reads=BFLOAT16, finite=True)
MXFP6 = QuantizationMethod(_E2M3, UINT8, 6, UINT8, _scales_below(1 << 19, 2), finite=True)
MXFP8 = QuantizationMethod(_E4M3, FP8.values, 8, UINT8, _scales_below(1 << 21, 8), finite=True)
MXFP4_E8M0 = MXFP4._replace(values=dtype("int8"), stored=E8M0)


class _QuantizedPart(Computed):
    """The common base of the two parts of a quantized weight [..., rows, columns]."""

    def __init__(self, name: str, weight: Tensor, method: QuantizationMethod, tall: int, wide: int) -> None:
        kind = method.reads or (weight.dtype if weight.dtype.itemsize <= 4 else FLOAT32)
        self.inputs = (Tensor(kind, weight.view),)
        self._name, self._method = name, method
        self._blocks = BlockGrid(weight.shape[-2], weight.shape[-1], tall, wide)

    def _read(self, first: int, last: int, read: InputReader) -> tuple[Floats, int, Floats]:
        """All rows under the rows of scales `first` to `last`, the index of the first, and the largest magnitudes."""
        blocks, weight = self._blocks, self.inputs[0]
        begin, end = blocks.rows_of(first)[0], blocks.rows_of(last - 1)[1]
        raw = read(weight, begin * blocks.columns, end * blocks.columns).reshape(end - begin, blocks.columns)
        largest = blocks.largest(raw, first, last)
        floats = as_float(largest, weight.dtype).astype(np.float32, copy=False)
        if self._method.finite and not np.isfinite(floats).all():
            raise not_finite(self._name, self.inputs[0], "an MX format")
        return raw, begin, floats

    def _memory_for_rows(self, scales: int, rows: int) -> int:
        """Bytes needed to read `rows` rows at a time, and to compute `scales` rows of scales."""
        blocks = self._blocks
        read = rows * blocks.columns * self.inputs[0].dtype.itemsize
        return read + scales * blocks.across * 32 + max(STEP_ELEMENTS, blocks.columns) * 48


class QuantizedScales(_QuantizedPart):
    """The scales of a weight."""

    def __init__(self, name: str, weight: Tensor, method: QuantizationMethod, tall: int, wide: int) -> None:
        super().__init__(name, weight, method, tall, wide)
        self.dtype = method.stored

    @property
    def few(self) -> int:
        blocks = self._blocks
        return max(blocks.across, READ_ELEMENTS // 4 // (blocks.tall * blocks.wide))

    def memory_for(self, count: int) -> int:
        blocks = self._blocks
        scales = count // blocks.across + 2
        rows = min(scales * blocks.tall, max(READ_ELEMENTS // blocks.columns, blocks.tall))
        return self._memory_for_rows(scales, rows) + count * self.dtype.itemsize

    def values(self, begin: int, end: int, read: InputReader) -> Floats:
        across = self._blocks.across
        first, last = begin // across, -(-end // across)
        out = np.empty((last - first, across), np.uint32 if self.dtype == FLOAT32 else np.uint8)
        step = max(1, READ_ELEMENTS // (self._blocks.tall * self._blocks.columns))
        for low in range(first, last, step):
            high = min(low + step, last)
            _, _, largest = self._read(low, high, read)
            out[low - first : high - first] = self._method.scales(largest).stored.view(out.dtype)
        return out.reshape(-1)[begin - first * across : end - first * across]


class QuantizedValues(_QuantizedPart):
    """The values of a weight, each the nearest code to its element times the factor of its block."""

    def __init__(self, name: str, weight: Tensor, method: QuantizationMethod, tall: int, wide: int) -> None:
        super().__init__(name, weight, method, tall, wide)
        self.dtype = method.values

    @property
    def few(self) -> int:
        return max(MIN_READ_ELEMENTS, self._blocks.tall * self._blocks.columns)

    def memory_for(self, count: int) -> int:
        blocks = self._blocks
        rows = count * 8 // (self._method.bits * blocks.columns) + 2
        return (
            self._memory_for_rows(blocks.scales_of(rows), rows + 2 * blocks.tall)
            + rows * (blocks.columns + 24)
            + count
        )

    def values(self, begin: int, end: int, read: InputReader) -> Floats:
        blocks = self._blocks
        items = blocks.columns * self._method.bits // 8  # per row
        first, last = begin // items, -(-end // items)
        index = blocks.of_rows(first, last)
        raw, start, largest = self._read(int(index[0]), int(index[-1]) + 1, read)
        factors = self._method.scales(largest).factors
        out = np.empty((last - first, items), np.uint8)
        step = max(1, STEP_ELEMENTS // blocks.columns)
        for low in range(0, last - first, step):
            part = slice(low, min(low + step, last - first))
            rows = raw[first - start + part.start : first - start + part.stop]
            out[part] = self._rounded(rows, factors[index[part] - index[0]])
        return out.reshape(-1)[begin - first * items : end - first * items]

    def _rounded(self, raw: Floats, factors: Floats) -> Floats:
        weight = self.inputs[0]
        values = as_float(raw, weight.dtype).astype(np.float32, copy=weight.dtype == FLOAT32)
        with np.errstate(invalid="ignore"):  # NaN and Inf are reported by name
            self._blocks.multiply(values, factors)
        codes = codes_of(values, self._method.table)
        return _packed(codes, self._method.bits)


def _packed(codes: Floats, bits: int) -> Floats:
    """Rows of codes of 8, 6 or 4 bits in bytes, beginning at the lowest bit."""
    if bits == 8:
        return codes
    if bits == 4:
        halves: Floats = codes[:, 0::2] | codes[:, 1::2] << 4
        return halves
    fours = codes.reshape(len(codes), -1, 4).astype("<u4") << np.arange(0, 24, 6, dtype="<u4")
    words: Floats = np.bitwise_or.reduce(fours, 2).astype("<u4")
    return words.view(np.uint8).reshape(len(codes), -1, 4)[:, :, :3].reshape(len(codes), -1)
