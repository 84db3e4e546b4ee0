"""Plain weights from MLX's quantized ones, and the reverse: sources whose elements are computed group by group."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

import numpy as np

from reshard.algebra.dtypes import dtype
from reshard.algebra.tensors import Computed, InputReader, Tensor
from reshard.algebra.views import View
from reshard.codecs.encoded_groups import EncodedGroups
from reshard.codecs.mlx_modes import (
    SMALL_FLOAT_MODES,
    Array,
    ModeSettings,
    packed,
    quantized,
    unpacked,
)
from reshard.transfer.elements import RAW_DTYPES, Overflows, as_float, cast

BFLOAT16, FLOAT32, UINT32 = dtype("bfloat16"), dtype("float32"), dtype("uint32")

STEP_ELEMENTS = 1 << 16
"""Elements computed at a time: their values fit in the cache of a core."""
BYTES_EACH = 64
"""Most bytes that computing an element takes."""


class WeightParts(NamedTuple):
    """The tensors of a quantized weight; `biases` are None but for affine ones."""

    items: Tensor
    scales: Tensor
    biases: Tensor | None = None


class MlxWeight(Computed):
    """The elements of a quantized weight, as `mx.dequantize` computes them on a CPU.

    An affine element is rounded to the dtype of the scales after the product with the scale, and again after the sum
    with the bias. Elements of other modes are bfloat16.
    """

    def __init__(self, parts: WeightParts, settings: ModeSettings) -> None:
        self.inputs = (parts.items, parts.scales, *([parts.biases] if parts.biases else []))
        self.dtype = parts.scales.dtype if parts.biases else BFLOAT16
        self._settings = settings

    def memory_for(self, count: int) -> int:
        settings = self._settings
        groups = count // settings.group + 2
        read = groups * (4 * settings.items + 16)
        elements = groups * settings.group
        return read + elements * self.dtype.itemsize + min(elements, STEP_ELEMENTS) * BYTES_EACH

    def values(self, begin: int, end: int, read: InputReader) -> Array:
        settings, dtype = self._settings, self.dtype
        group, items = settings.group, settings.items
        first, last = begin // group, -(-end // group)
        packed = read(self.inputs[0], first * items, last * items).reshape(-1, items)
        factors = [read(tensor, first, last) for tensor in self.inputs[1:]]
        out = np.empty((last - first, group), RAW_DTYPES[dtype.itemsize])
        step = max(1, STEP_ELEMENTS // group)
        for low in range(0, last - first, step):
            part = slice(low, low + step)
            codes = unpacked(packed[part], settings.bits)
            floats = self._floats(codes, [each[part, None] for each in factors])
            out[part] = read.cast(np.ascontiguousarray(floats).view(np.uint32), FLOAT32, dtype)
        return out.reshape(-1)[begin - first * group : end - first * group]

    def _floats(self, codes: Array, factors: list[Array]) -> Array:
        """Elements that are still to be rounded."""
        if small := SMALL_FLOAT_MODES.get(self._settings.mode):
            with np.errstate(over="ignore", invalid="ignore"):  # reported by name as NaN or Inf
                scaled: Array = small.elements[codes] * small.scales[factors[0]]
            return scaled
        scales, biases = (as_float(each, self.dtype).astype(np.float32, copy=False) for each in factors)
        with np.errstate(over="ignore", invalid="ignore"):
            products = codes.astype(np.float32) * scales
            rounded = cast(products.view(np.uint32), FLOAT32, self.dtype, Overflows())
            sums: Array = as_float(rounded, self.dtype).astype(np.float32, copy=False) + biases
        return sums


class _AffinePart(EncodedGroups):
    """The common base of the parts of an affine weight."""

    method, step = "affine weights", STEP_ELEMENTS

    def __init__(self, name: str, weight: Tensor, settings: ModeSettings) -> None:
        super().__init__(name, weight, settings.group)
        self._settings, self.dtype = settings, weight.dtype

    def memory_for(self, count: int) -> int:
        groups = count // self.per_group + 2
        elements = groups * self._settings.group
        return (
            elements * self.inputs[0].dtype.itemsize + 4 * count + min(elements, STEP_ELEMENTS) * BYTES_EACH
        )


class AffineItems(_AffinePart):
    """The packed codes."""

    def __init__(self, name: str, weight: Tensor, settings: ModeSettings) -> None:
        super().__init__(name, weight, settings)
        self.dtype, self.per_group = UINT32, settings.items

    def _items(self, floats: Array, read: InputReader) -> Array:
        bits = self._settings.bits
        return packed(quantized(floats, bits).codes, bits)


class AffineScales(_AffinePart):
    """The scales."""

    factors = attrgetter("scales")

    def _items(self, floats: Array, read: InputReader) -> Array:
        values = self.factors(quantized(floats, self._settings.bits))
        return read.cast(np.ascontiguousarray(values, np.float32).view(np.uint32), FLOAT32, self.dtype)


class AffineBiases(AffineScales):
    """The biases."""

    factors = attrgetter("biases")


def dequantized(parts: WeightParts, settings: ModeSettings) -> Tensor:
    """The plain weight."""
    source = MlxWeight(parts, settings)
    shape = (*parts.scales.shape[:-1], parts.scales.shape[-1] * settings.group)
    return Tensor(source.dtype, View.of(source, *shape))


def affine(name: str, weight: Tensor, settings: ModeSettings) -> dict[str, Tensor]:
    """The parts of a weight whose last axis the group divides, by what they are called in its module."""
    outer, groups = weight.shape[:-1], weight.shape[-1] // settings.group
    sources = {
        "weight": (AffineItems(name, weight, settings), groups * settings.items),
        "scales": (AffineScales(name, weight, settings), groups),
        "biases": (AffineBiases(name, weight, settings), groups),
    }
    return {
        part: Tensor(source.dtype, View.of(source, *outer, size)) for part, (source, size) in sources.items()
    }
