"""Weights that bitsandbytes quantized: 4 bits that index a table, or 8 bits with a scale per row.

The arithmetic is that of bitsandbytes 0.50 on a CPU (`dequantize_4bit`, `int8_vectorwise_dequant`), in float32, and
rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, TypeGuard

import numpy as np

from reshard.algebra.dtypes import DType, dtype
from reshard.algebra.tensors import Computed, InputReader, Tensor
from reshard.algebra.views import View
from reshard.base.errors import ReshardError
from reshard.base.plain_json import json_of
from reshard.formats.quantization import QuantizedWeight, part_of
from reshard.model.block_grid import Floats
from reshard.transfer.elements import CAST_BYTES_EACH
from reshard.transfer.gather import Gatherer
from reshard.transfer.thread_files import OpenFiles

FLOAT32 = dtype("float32")
RECIPROCAL_OF_127 = np.float32(7.874015718698502e-3)
NESTED_ROLES = ("nested_absmax", "nested_quant_map")
STATES = ("nf4", "fp4")


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

    def room(self, count: int) -> int:
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

    def room(self, count: int) -> int:
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


def plain(name: str, weight: QuantizedWeight, tensors: Mapping[str, Tensor], wanted: DType) -> Tensor | None:
    """The weight `name`; None if its parts do not match each other. Raises ReshardError if a part cannot be read."""
    packed = tensors[weight.values]
    if weight.scheme.beside == ("SCB",):
        largest = tensors[part_of(name, "SCB")]
        order = tensors.get(part_of(name, "weight_format"))
        in_rows = order is None or not stored_values(order).any()
        fits = len(packed.shape) == 2 and largest.shape == packed.shape[:1] and largest.dtype == FLOAT32
        view = View.of(RowwiseWeight(packed, largest, wanted), *packed.shape) if fits and in_rows else None
        return Tensor(wanted, view) if view else None
    kind = next((each for each in STATES if f"{name}.quant_state.bitsandbytes__{each}" in tensors), None)
    if kind is None:
        return None
    state = _state(tensors[f"{name}.quant_state.bitsandbytes__{kind}"])
    is_nested = f"{name}.{NESTED_ROLES[0]}" in tensors
    there = [tensors.get(f"{name}.{part}") for part in ("absmax", "quant_map", *NESTED_ROLES * is_nested)]
    inputs = (packed, *(tensor for tensor in there if tensor))
    shape, offset = state.get("shape"), state.get("nested_offset", 0.0)
    sizes = [state.get("blocksize"), *[state.get("nested_blocksize")] * is_nested]
    if not _are_sizes(shape) or not _are_sizes(sizes) or not isinstance(offset, float | int):
        return None
    if None in there or not _fit(inputs, shape, sizes):
        return None
    source = LookedUpWeight(inputs, sizes[0], sizes[1] if is_nested else 0, float(offset), wanted)
    return Tensor(wanted, View.of(source, prod(shape)).reshape(*shape))


def _are_sizes(numbers: Any) -> TypeGuard[list[int]]:
    return isinstance(numbers, list) and all(type(number) is int and number > 0 for number in numbers)


def _fit(inputs: tuple[Tensor, ...], shape: list[int], sizes: list[int]) -> bool:
    """Whether the numbers of values, scales and table entries match a weight of this shape, in float32."""
    values, scales = prod(shape), -(-prod(shape) // sizes[0])
    counts = [scales, 16, *[-(-scales // size) for size in sizes[1:]], *[256] * (len(sizes) - 1)]
    kinds = ["uint8" if len(sizes) > 1 else "float32", *["float32"] * (len(counts) - 1)]
    packed, others = inputs[0], inputs[1:]
    fits = packed.view.numel * 2 * packed.dtype.itemsize == values
    return fits and [(t.view.numel, t.dtype.name) for t in others] == list(zip(counts, kinds, strict=True))


def _state(tensor: Tensor) -> Mapping[str, Any]:
    """The settings stored as JSON in a tensor of bytes."""
    try:
        content = json_of(stored_values(tensor).tobytes())
    except ValueError as error:
        raise ReshardError(
            "bitsandbytes-state-unreadable",
            "the state of a quantized weight cannot be read",
            file=tensor.file,
            found=str(error),
            remedy="copy or download the file again",
        ) from error
    return content if isinstance(content, dict) else {}


def stored_values(tensor: Tensor) -> Floats:
    """The elements of a small tensor that describes others."""
    files = OpenFiles()
    try:
        return Gatherer(files, None).read(tensor, 0, min(tensor.view.numel, 1 << 16))
    finally:
        files.close()
