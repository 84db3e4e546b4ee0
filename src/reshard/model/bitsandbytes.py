"""Find the parts of weights that bitsandbytes quantized, and the settings that it stores in tensors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from math import prod
from typing import Any, TypeGuard

from reshard.algebra.dtypes import DType, dtype
from reshard.algebra.tensors import Tensor
from reshard.algebra.views import View
from reshard.base.errors import ReshardError
from reshard.base.plain_json import json_of
from reshard.codecs.bitsandbytes import LookedUpWeight, RowwiseWeight
from reshard.codecs.block_grid import Floats
from reshard.formats.quantization import QuantizedWeight, part_of
from reshard.transfer.gather import Gatherer
from reshard.transfer.thread_files import OpenFiles

FLOAT32 = dtype("float32")
NESTED_ROLES = ("nested_absmax", "nested_quant_map")
STATES = ("nf4", "fp4")


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
    parts = [tensors.get(f"{name}.{part}") for part in ("absmax", "quant_map", *NESTED_ROLES * is_nested)]
    inputs = (packed, *(tensor for tensor in parts if tensor))
    shape, offset = state.get("shape"), state.get("nested_offset", 0.0)
    sizes = [state.get("blocksize"), *[state.get("nested_blocksize")] * is_nested]
    if not _are_sizes(shape) or not _are_sizes(sizes) or not isinstance(offset, float | int):
        return None
    if None in parts or not _fit(inputs, shape, sizes):
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
    with closing(OpenFiles()) as files:
        return Gatherer(files, None).read(tensor, 0, min(tensor.view.numel, 1 << 16))
