"""Plain weights from quantized ones: a checkpoint whose weights are computed from packed values and their scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from reshard.algebra.dtypes import DType, castable, dtype
from reshard.algebra.tensors import Tensor
from reshard.algebra.views import View
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.base.later_imports import imported_later
from reshard.base.merged_problems import one_for_all
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.module_quantization import ModuleQuantization, QuantizationSettings
from reshard.formats.quantization import (
    BLOCK_METHOD,
    Quantization,
    QuantizedWeight,
    blocks_told,
    of_first_group,
    part_of,
    refusal,
)
from reshard.formats.quantization_schemes import (
    BITSANDBYTES,
    GROUPED,
    NVFP4_EXPERTS,
    PACKED_INT,
    STACKED_EXPERTS,
    Shape,
)

with imported_later(__name__):
    from reshard.codecs.block_grid import BlockGrid
    from reshard.codecs.byte_values import values_in
    from reshard.codecs.decoded_blocks import DequantizedWeight, WeightArithmetic, WeightKind
    from reshard.codecs.grouped_weights import grouped, packing_of
    from reshard.model import bitsandbytes
    from reshard.model.weight_kinds import disagreements, is_outer, module_of, weight_kind


FLOAT32 = dtype("float32")
BFLOAT16, FLOAT16 = dtype("bfloat16"), dtype("float16")

UNUSED_SCALES = "quantization data"
"""The rule for dropping scales of activations and similar tensors."""


_GROUPS = {"W4A8_NVFP4_FP8": {16, 32}}
"""The sizes of groups that ModelOpt does not tell in config.json, by `quant_algo`; 16 for all others."""


def dequantized(
    checkpoint: Checkpoint,
    wanted: DType | None = None,
    refused: Callable[[Quantization, Path], ReshardError] = refusal,
) -> Checkpoint:
    """`checkpoint` with plain weights of dtype `wanted` instead of quantized ones; other tensors are unchanged.

    The default dtype is bfloat16, or float16 if the scales have it. Raises ReshardError naming the method, or the
    weights, with unknown arithmetic; `refused` makes the error for an unknown method.
    """
    found = checkpoint.quantization
    if found is None:
        return checkpoint
    plainly = _Dequantizer(found, checkpoint.tensors, wanted or BFLOAT16)
    path = str(checkpoint.path)
    unlike = disagreements(found, checkpoint.tensors, plainly.settings)
    raise_all(one_for_all(unlike, found.weights, path))
    if not found.weights or not all(plainly.knows(*each) for each in found.weights.items()):
        raise refused(found, checkpoint.path)
    plainly.wanted = wanted = wanted or _dtype_of_scales(checkpoint)
    made = {name: plainly.plain(name, weight) for name, weight in found.weights.items()}
    weights = {name: tensor for name, tensor in made.items() if isinstance(tensor, Tensor)}
    misfits = (each for each in made.values() if isinstance(each, Problem))
    raise_all(one_for_all(misfits, found.weights, path))
    dropped = checkpoint.dropped.copy()
    used = {part_of(name, role) for name, weight in found.weights.items() for role in weight.scheme.inputs}
    if unused := sum(checkpoint.tensors[name].nbytes for name in found.beside - used):
        dropped[UNUSED_SCALES] += unused
    names = {weight.values: name for name, weight in found.weights.items()}
    plain = {names.get(name, name): tensor for name, tensor in checkpoint.tensors.items()}
    return replace(
        checkpoint,
        tensors={name: weights.get(name, plain[name]) for name in plain if name not in found.beside},
        quantization=None,
        dropped=dropped,
        spare=frozenset(f"{name.removesuffix('weight')}bias" for name in found.weights)
        if packing_of(found.settings)
        else frozenset(),
        notes=[*checkpoint.notes, f"{len(weights)} quantized weights are dequantized to {wanted}: {found}"],
    )


def _dtype_of_scales(checkpoint: Checkpoint) -> DType:
    found = checkpoint.quantization
    assert found is not None
    kinds = {checkpoint.tensors[part_of(n, w.scheme.inputs[0])].dtype for n, w in found.weights.items()}
    return FLOAT16 if kinds == {FLOAT16} else BFLOAT16


class _Dequantizer:
    """Makes plain weights of dtype `wanted`. What layers share is determined once."""

    def __init__(self, found: Quantization, tensors: Mapping[str, Tensor], wanted: DType) -> None:
        self.wanted = wanted
        self._found, self._tensors, self.settings = found, tensors, QuantizationSettings(found.settings)
        self._packing = packing_of(found.settings)
        self._kinds: dict[tuple[Any, ...], WeightKind | None] = {}
        self._known: dict[tuple[Any, ...], WeightArithmetic | None] = {}

    def knows(self, name: str, weight: QuantizedWeight) -> bool:
        """Whether the arithmetic of a weight is known."""
        if not weight.scheme.of_method(self._found.settings):
            return False
        if weight.scheme.methods == GROUPED:
            return self._packing is not None
        return weight.scheme.methods == BITSANDBYTES or self._kind(name, weight)[1] is not None

    def _kind(self, name: str, weight: QuantizedWeight) -> tuple[ModuleQuantization, WeightKind | None]:
        told = self.settings.of(module_of(name))
        key = (weight.scheme, self._tensors[weight.values].dtype, told)
        if key not in self._kinds:
            self._kinds[key] = weight_kind(weight, told, self._found, self._tensors)
        return told, self._kinds[key]

    def plain(self, name: str, weight: QuantizedWeight) -> Tensor | Problem:
        """One plain weight, or a problem if its scales do not match it."""
        found, tensors, wanted = self._found, self._tensors, self.wanted
        first, *others = weight.scheme.inputs
        packed, scales = tensors[weight.values], tensors[part_of(name, first)]
        if weight.scheme.methods == BITSANDBYTES:
            return bitsandbytes.plain(name, weight, tensors, wanted) or _misfit(name, packed, scales, found)
        if self._packing and weight.scheme.methods == GROUPED:
            qzeros, g_idx = tensors[part_of(name, "qzeros")], tensors.get(part_of(name, "g_idx"))
            plain = grouped(self._packing, weight.bits, packed, qzeros, scales, g_idx, wanted)
            return plain or _misfit(name, packed, scales, found)
        more = [tensors[part_of(name, role)] for role in others if part_of(name, role) in tensors]
        unused = [role for role in weight.scheme.more if role not in others]
        extra = [role for role in unused if part_of(name, role) in tensors]
        if weight.scheme is NVFP4_EXPERTS and len(packed.shape) == len(scales.shape) == 3:
            packed, scales = (Tensor(each.dtype, each.view.permute(0, 2, 1)) for each in (packed, scales))
        told, kind = self._kind(name, weight)
        assert kind is not None  # others were refused before
        shapes = tuple((tensor.dtype, tensor.shape) for tensor in (packed, scales, *more))
        key = (weight.scheme, told, shapes)
        if key not in self._known:
            self._known[key] = self._arithmetic(name, weight, told, kind, [packed, scales, *more])
        arithmetic = self._known[key]
        if arithmetic is None or extra:
            return _misfit(name, packed, scales, found, extra)
        source = DequantizedWeight(packed, scales, arithmetic, more)
        view = View.of(source, *arithmetic.shape)
        if weight.scheme not in (STACKED_EXPERTS, NVFP4_EXPERTS):
            return Tensor(wanted, view)
        if weight.scheme is STACKED_EXPERTS and (arithmetic.blocks.tall, arithmetic.blocks.wide) == (1, 32):
            source.mxfp4 = packed, scales
        return Tensor(wanted, view.permute(0, 2, 1))

    def _arithmetic(
        self,
        name: str,
        weight: QuantizedWeight,
        told: ModuleQuantization,
        kind: WeightKind,
        inputs: Sequence[Tensor],
    ) -> WeightArithmetic | None:
        """How to compute a weight from its inputs; None if it cannot be determined."""
        found, (packed, scales, *more) = self._found, inputs
        # Experts of MXFP4 are stored as [expert, out, block, items of a block]; the weight is [expert, in, out].
        axes = 2 if weight.scheme is STACKED_EXPERTS else len(packed.shape) - 1
        size = prod(packed.shape[axes:]) * packed.dtype.itemsize
        shape = (*packed.shape[:axes], values_in(kind.table, size))
        blocks = _blocks(shape, scales.shape, found) if len(shape) > 1 and all(shape) else None
        if weight.scheme is PACKED_INT and blocks != self._blocks_of_ints(name, told, shape):
            blocks = None  # a row may end in a partly filled item
        if blocks is None or not _is_scale(scales.dtype) or not _fits(kind, blocks, told, scales):
            return None
        if kind.applied and not _are_outer(more, shape[-1]):
            return None
        groups = more[0] if more and not kind.applied else None
        if groups and (groups.shape != shape[-1:] or groups.dtype.name not in ("int32", "int64")):
            return None
        rows = prod(shape[:-1])
        height = rows if scales.view.numel == 1 else shape[-2]
        return WeightArithmetic(
            shape,
            BlockGrid(height, shape[-1], *blocks),
            packed.view.numel // rows,
            kind,
            packed.dtype,
            scales.dtype,
            self.wanted,
            groups is not None,
            bool(kind.applied and more[1:]),
        )

    def _blocks_of_ints(self, name: str, told: ModuleQuantization, shape: Shape) -> tuple[int, int] | None:
        """How many rows and columns of packed integers share a scale; None if rows end in partly filled items."""
        if bitsandbytes.stored_values(self._tensors[part_of(name, "{}_shape")]).tolist() != list(shape):
            return None
        match told.args.get("strategy"), told.args.get("group_size"):
            case "tensor", _:
                return prod(shape[:-1]), shape[-1]
            case "channel", _:
                return 1, shape[-1]
            case _, int(size):
                return 1, size
        return None


def _fits(kind: WeightKind, blocks: tuple[int, int], told: ModuleQuantization, scales: Tensor) -> bool:
    """Whether scales of NVFP4 are stored in FP8, and others not; both these and exponents as the settings say."""
    size = told.args.get("group_size") or of_first_group(told.args, "group_size")
    if not kind.applied:
        differs = scales.dtype.name == "uint8" and isinstance(size, int) and blocks != (1, size)
        return scales.dtype.name != "float8_e4m3fn" and not differs
    wide = {size} if isinstance(size, int) else _GROUPS.get(told.how, {16})
    return blocks[0] == 1 and blocks[1] in wide and scales.dtype.name == "float8_e4m3fn"


def _are_outer(more: Sequence[Tensor], columns: int) -> bool:
    """Whether these are the scale of a complete weight and, if there are more, factors of its columns."""
    outer, *factors = more
    fit = all(each.shape == (columns,) and castable(each.dtype) for each in factors)
    return fit and is_outer(outer)


def _is_scale(stored: DType) -> bool:
    return castable(stored) or stored.name in ("uint8", "float8_e8m0fnu", "float8_e4m3fn")


def _blocks(shape: Shape, scales: Shape, found: Quantization) -> tuple[int, int] | None:
    """How many rows and columns share a scale: a row, blocks of the settings, or such as divide the weight evenly.

    None if neither fits; without settings, smaller blocks at the edges would be ambiguous.
    """
    if prod(scales) == 1:
        return prod(shape[:-1]), shape[-1]
    if scales == shape[:-1]:
        return 1, shape[-1]
    if len(scales) != len(shape) or scales[:-2] != shape[:-2]:
        return None
    grid = scales[-2:]
    told = blocks_told(found.settings)
    if told and grid == (-(-shape[-2] // told[0]), -(-shape[-1] // told[1])):
        return told
    if any(not count or size % count for size, count in zip(shape[-2:], grid, strict=True)):
        return None
    return shape[-2] // grid[0], shape[-1] // grid[1]


def _misfit(
    name: str, packed: Tensor, scales: Tensor, found: Quantization, extra: Sequence[str] = ()
) -> Problem:
    beside = (
        f", beside them {', '.join(part_of(name, role).rpartition('.')[2] for role in extra)}"
        if extra
        else ""
    )
    has_blocks = found.settings.get("quant_method", BLOCK_METHOD) == BLOCK_METHOD
    size = " (config.json: weight_block_size)" if has_blocks else ""
    return Problem(
        "quantized-scales-wrong",
        "the scales of a quantized weight do not match it",
        tensor=name,
        file=packed.file,
        rule="a scale belongs to the complete weight, to a row, or to a block",
        expected=f"scales that cover the weight evenly{size}",
        found=f"{packed.dtype} {list(packed.shape)}, scales {scales.dtype} {list(scales.shape)}{beside}; {found}",
        remedy="pass the config.json of these weights; if it is correct, reshard does not know their scheme: "
        "dequantize the model as its publisher describes",
        values={"size": size},
    )
