"""NVFP4 made of plain weights, bit for bit as compressed-tensors 0.20 does with the scales of llm-compressor 0.14.

Each 16 elements of a row share a scale in FP8, and all of a weight a scale in float32 (`generate_gparam` and
`calculate_qparams` of compressed-tensors, in the dtype of the weight). Weights that vLLM joins into one share the
latter, as in `FUSED_LAYER_NAMES` of llm-compressor: vLLM uses one for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from reshard.algebra.dtypes import dtype
from reshard.algebra.tensors import MIN_READ_ELEMENTS, Computed, InputReader, Tensor
from reshard.codecs.block_grid import (
    STEP_ELEMENTS,
    BlockGrid,
    Floats,
    codes_of,
    nearest_codes,
    rounded_to,
    small_floats,
)
from reshard.codecs.not_finite import not_finite
from reshard.transfer.elements import as_float

FLOAT32, UINT8, FP8 = dtype("float32"), dtype("uint8"), dtype("float8_e4m3fn")
BLOCK_ELEMENTS = 16
"""Elements that share a scale."""

READ_ELEMENTS = 1 << 18
"""Elements read at a time to find the largest."""

_FP8 = small_floats(4, 3, 7, "fn")
_TO_FP8, _TO_FP4 = nearest_codes(_FP8), nearest_codes(small_floats(2, 1, 1))
_LARGEST_VALUE = np.float32(448 * 6)
_SCALE_OF_ZEROS = 0x20
"""The code of the scale of a block of zeros."""


class GlobalScale(Computed):
    """The scale in float32 of one or more weights: 448 · 6 over their largest magnitude, but 1 if that overflows.

    `known` keeps the result for all that use it.
    """

    def __init__(self, weights: Mapping[str, Tensor], known: dict[str, Floats]) -> None:
        self.dtype, self.inputs = FLOAT32, tuple(weights.values())
        self._names, self._known = tuple(weights), known

    @property
    def few(self) -> int:
        return 1

    def memory_for(self, count: int) -> int:
        return READ_ELEMENTS * 3 * max(tensor.dtype.itemsize for tensor in self.inputs) + 4096

    def values(self, begin: int, end: int, read: InputReader) -> Floats:
        if "scale" not in self._known:
            self._known["scale"] = self._computed(read)
        return self._known["scale"].view(np.uint32)[begin:end]

    def _computed(self, read: InputReader) -> Floats:
        largest, kind = np.zeros(1, np.float32), self.inputs[0].dtype
        for name, tensor in zip(self._names, self.inputs, strict=True):
            for low in range(0, tensor.view.numel, READ_ELEMENTS):
                raw = read(tensor, low, min(low + READ_ELEMENTS, tensor.view.numel))
                high = (raw & raw.dtype.type((1 << (8 * raw.itemsize - 1)) - 1)).max(keepdims=True)
                largest = np.maximum(largest, as_float(high, tensor.dtype).astype(np.float32))
            if not np.isfinite(largest[0]):
                raise not_finite(name, tensor, "NVFP4")
        with np.errstate(over="ignore"):
            least = np.float32(np.finfo(np.float16 if kind.name == "float16" else np.float32).tiny)
            inverse = rounded_to(
                np.float32(1) / np.maximum(largest, least), kind
            )  # as torch divides a number by a tensor
            scale = rounded_to(inverse * _LARGEST_VALUE, kind)
        return np.where(np.isfinite(scale), scale, np.float32(1))


class Nvfp4Scales(Computed):
    """The scales of the blocks of a weight, in FP8: each belongs to `elements` elements.

    `inputs` are the weight [..., rows, columns] and its scale.
    """

    dtype, elements = FP8, BLOCK_ELEMENTS

    def __init__(self, weight: Tensor, outer: Tensor) -> None:
        self.inputs = (weight, outer)
        rows = weight.view.numel // weight.shape[-1]
        self._blocks = BlockGrid(rows, weight.shape[-1], 1, BLOCK_ELEMENTS)

    def _items(self, raw: Floats, outer: Floats) -> Floats:
        """What is stored of some rows: the codes of their scales."""
        kind = self.inputs[0].dtype
        largest = self._blocks.largest(raw, 0, len(raw))
        floats = as_float(largest, kind).astype(np.float32)
        scales = np.minimum(rounded_to(floats / np.float32(6), kind) * outer, np.float32(448))
        codes = codes_of(np.ascontiguousarray(scales), _TO_FP8)
        return np.where(codes == 0, np.uint8(_SCALE_OF_ZEROS), codes)

    def values(self, begin: int, end: int, read: InputReader) -> Floats:
        columns, weight = self._blocks.columns, self.inputs[0]
        items, outer = columns // self.elements, read(self.inputs[1], 0, 1).view(np.float32)
        first, last = begin // items, -(-end // items)
        out = np.empty((last - first, items), np.uint8)
        step = max(1, STEP_ELEMENTS // columns)
        for low in range(first, last, step):
            high = min(low + step, last)
            raw = read(weight, low * columns, high * columns).reshape(high - low, columns)
            out[low - first : high - first] = self._items(raw, outer)
        return out.reshape(-1)[begin - first * items : end - first * items]

    def memory_for(self, count: int) -> int:
        columns = self._blocks.columns
        rows = count * self.elements // columns + 2
        return rows * columns + max(STEP_ELEMENTS, columns) * 64 + 4096

    @property
    def few(self) -> int:
        return max(MIN_READ_ELEMENTS, self._blocks.columns)


class Nvfp4Values(Nvfp4Scales):
    """The values of a weight, two in a byte: each element over the scale of its block, to the nearest, ties to even."""

    dtype, elements = UINT8, 2

    def _items(self, raw: Floats, outer: Floats) -> Floats:
        scales = _FP8[super()._items(raw, outer)] / outer
        floats = as_float(raw, self.inputs[0].dtype).astype(np.float32)
        with np.errstate(over="ignore"):
            floats = (floats.reshape(len(raw), -1, BLOCK_ELEMENTS) / scales[:, :, None]).reshape(raw.shape)
        codes = codes_of(floats, _TO_FP4)
        codes[floats == 0] = 0  # also of -0, as there
        packed: Floats = codes[:, 0::2] | codes[:, 1::2] << 4
        return packed
