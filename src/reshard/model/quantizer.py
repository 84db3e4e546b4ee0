"""Quantize plain weights: values and scales, computed from the elements block by block.

FP8 as `Fp8Quantize` of transformers 5.23 makes it (integrations/finegrained_fp8.py), in the blocks of 128 × 128 that
DeepSeek publishes; MXFP4 as `downcast_to_mxfp_torch` of triton_kernels 3.5, with which transformers quantizes gpt-oss.
NVFP4 is in `nvfp4.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from reshard.algebra.dtypes import DType, dtype
from reshard.algebra.tensors import MIN_READ_ELEMENTS, Computed, InputReader, Tensor, least_room
from reshard.algebra.views import View
from reshard.base.errors import ReshardError, listed
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.quantization import blocks_told, not_finite, part_of
from reshard.model import nvfp4
from reshard.model.block_grid import STEP_ELEMENTS, BlockGrid, Floats, codes_of, nearest_codes, small_floats
from reshard.model.nvfp4 import Nvfp4
from reshard.transfer.elements import as_float, castable
from reshard.transfer.memory_budget import MemoryNeed, most
from reshard.transfer.plan import Planned

FLOAT32, BFLOAT16, UINT8 = dtype("float32"), dtype("bfloat16"), dtype("uint8")

READ_ELEMENTS = 1 << 22
"""Elements read at a time to compute scales: if a source is transposed, one read serves many rows."""


class BlockScales(NamedTuple):
    """The scales of some blocks: as stored, and the factors that scale the weight to the range of the format."""

    stored: Floats
    factors: Floats


class QuantizationMethod(NamedTuple):
    """How values and scales are computed from a weight, and how they are stored.

    `table` rounds (`nearest_codes`), and `packed` values make an item of dtype `values`. `scales` computes scales from
    the largest magnitude of each block. A weight is read as `reads`, if that is given, and must be `finite` if the
    format has no code for NaN or Inf.
    """

    table: Floats
    values: DType
    packed: int
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


def _mx_scales(largest: Floats) -> BlockScales:
    """The exponents of powers of two, not below the largest magnitude over 6. Below 2^-126, scale and values are 0."""
    bits = (largest / np.float32(6)).view(np.uint32)
    exponents = (bits + np.uint32(0x7FFFFF)) >> 23
    powers = (exponents << 23).view(np.float32)
    with np.errstate(divide="ignore"):
        factors = np.where(exponents > 0, np.float32(1) / powers, np.float32(0))
    return BlockScales(exponents.astype(np.uint8), factors)


_E4M3 = nearest_codes(small_floats(4, 3, 7, "fn"))
_E2M1 = nearest_codes(small_floats(2, 1, 1))
FP8 = QuantizationMethod(_E4M3, dtype("float8_e4m3fn"), 1, FLOAT32, _fp8_scales)
UE8M0 = QuantizationMethod(_E4M3, dtype("float8_e4m3fn"), 1, FLOAT32, _ue8m0_scales)
MXFP4 = QuantizationMethod(_E2M1, UINT8, 2, UINT8, _mx_scales, reads=BFLOAT16, finite=True)


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
            raise not_finite(self._name, self.inputs[0], "MXFP4")
        return raw, begin, floats

    def _room(self, scales: int, rows: int) -> int:
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

    def room(self, count: int) -> int:
        blocks = self._blocks
        scales = count // blocks.across + 2
        rows = min(scales * blocks.tall, max(READ_ELEMENTS // blocks.columns, blocks.tall))
        return self._room(scales, rows) + count * self.dtype.itemsize

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

    def room(self, count: int) -> int:
        blocks = self._blocks
        rows = count * self._method.packed // blocks.columns + 2
        return (
            self._room(blocks.scales_of(rows), rows + 2 * blocks.tall) + rows * (blocks.columns + 24) + count
        )

    def values(self, begin: int, end: int, read: InputReader) -> Floats:
        blocks, packed = self._blocks, self._method.packed
        items = blocks.columns // packed  # per row
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
        if self._method.packed == 1:
            return codes
        halves: Floats = codes[:, 0::2] | codes[:, 1::2] << 4
        return halves


class QuantizedStorage(NamedTuple):
    """The storage of weights for one value of `--quantize`.

    A weight becomes two tensors, named by appending each of `names`. The elements of each of `blocks` share a scale.
    """

    method: QuantizationMethod
    names: tuple[str, str]
    blocks: tuple[int, int]

    def parts(self, name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The values and the scales of a weight [..., rows, columns]; of experts in MXFP4, [expert, in, out]."""
        method, (tall, wide) = self.method, self.blocks
        if method is MXFP4:
            weight = Tensor(weight.dtype, weight.view.permute(0, 2, 1))
        *outer, rows, columns = weight.shape
        grid = (*outer, -(-rows // tall), -(-columns // wide))
        values = QuantizedValues(name, weight, method, tall, wide)
        scales = QuantizedScales(name, weight, method, tall, wide)
        shape = (*grid, wide // 2) if method is MXFP4 else weight.shape
        return (
            Tensor(values.dtype, View.of(values, *shape)),
            Tensor(scales.dtype, View.of(scales, *grid)),
        )

    def need(self, names: Mapping[tuple[DType, tuple[int, ...]], str]) -> MemoryNeed:
        """The least memory for quantizing weights; `names` has an example name for each dtype and shape."""
        return most(
            MemoryNeed(least_room(part.view), name)
            for (dtype, shape), name in names.items()
            for part in self.parts(name, Tensor(dtype, View.of(None, *shape)))
        )

    def planned(self, tensor: Planned) -> Iterator[Planned]:
        """The tensors stored instead of a weight; its view is compiled when one of the two is written."""
        nothing = Tensor(tensor.dtype, View.of(None, *tensor.shape))
        for index, part in enumerate(self.parts(tensor.name, nothing)):
            yield Planned(
                f"{tensor.name}{self.names[index]}", part.dtype, part.shape, self._compiler(tensor, index)
            )

    def all_planned(self, tensors: Iterable[Planned], chosen: frozenset[str]) -> Iterator[Planned]:
        """All tensors of a folder, with those stored instead of the `chosen`."""
        for tensor in tensors:
            yield from self.planned(tensor) if tensor.name in chosen else (tensor,)

    def _compiler(self, tensor: Planned, index: int) -> Callable[[], View]:
        return lambda: self.parts(tensor.name, Tensor(tensor.dtype, tensor.source()))[index].view


STORAGES: dict[str, QuantizedStorage | Nvfp4] = {
    "fp8": QuantizedStorage(FP8, ("", "_scale_inv"), (128, 128)),
    "fp8-ue8m0": QuantizedStorage(UE8M0, ("", "_scale_inv"), (128, 128)),
    "mxfp4": (_MXFP4 := QuantizedStorage(MXFP4, ("_blocks", "_scales"), (1, 32))),
    "nvfp4": Nvfp4(),
}
"""The values of `--quantize`."""


class StoredWeight(NamedTuple):
    """A quantized weight of a checkpoint, and how it is stored."""

    storage: QuantizedStorage
    values: Tensor
    scales: Tensor


def stored_weights(checkpoint: Checkpoint) -> dict[str, StoredWeight]:
    """The weights that are stored as `--quantize` does, with blocks of any size, by name."""
    found = checkpoint.quantization
    result = {}
    for name, weight in found.weights.items() if found else ():
        storage = _storage(found.settings, weight.scheme.name) if found else None
        scales = checkpoint.tensors[part_of(name, weight.scheme.beside[0])]
        if storage and scales.dtype == storage.method.stored:
            result[name] = StoredWeight(storage, checkpoint.tensors[weight.values], scales)
    return result


def _storage(settings: Mapping[str, Any], scheme: str) -> QuantizedStorage | None:
    """The storage that `settings` describe, if `--quantize` has it."""
    if scheme == "MXFP4":
        return _MXFP4
    blocks = blocks_told(settings)
    if scheme != "FP8" or settings.get("quant_method") != "fp8" or not blocks:
        return None
    method = UE8M0 if settings.get("scale_fmt") == "ue8m0" else FP8
    return QuantizedStorage(method, ("", "_scale_inv"), blocks)


_LAYER = re.compile(r"(?:(?:model|language_model|text_model|llm|thinker|mtp)\.)*layers\.\d+\.(.+)")
"""Names of decoder layers, excluding those of towers and talkers."""

_UNQUANTIZED_MODULES = {
    *("gate", "router", "shared_expert_gate", "eh_proj", "embed_tokens", "shared_head", "conv1d"),
    *("in_proj_a", "in_proj_b", "in_proj_ba", "weights_proj"),
}
"""Modules of a layer that DeepSeek, Qwen, MiniMax and Zhipu leave unquantized in their FP8 folders."""

_STACKED = ("experts.gate_up_proj", "experts.down_proj")


def _inner(name: str) -> str | None:
    """The name of a tensor within its decoder layer."""
    match = _LAYER.fullmatch(name)
    return match[1] if match else None


def _is_linear(tensor: Planned) -> bool:
    """Whether a tensor is the weight of a linear layer in a decoder layer, which publishers quantize."""
    match = _LAYER.fullmatch(tensor.name)
    if not match or not castable(tensor.dtype) or len(tensor.shape) != 2:
        return False
    module, _, last = match[1].rpartition(".")
    return last == "weight" and _UNQUANTIZED_MODULES.isdisjoint(module.split("."))


def _is_stacked(tensor: Planned) -> bool:
    """Whether a tensor stacks all experts of a decoder layer."""
    match = _LAYER.fullmatch(tensor.name)
    return bool(match) and len(tensor.shape) == 3 and tensor.name.endswith(_STACKED)


class QuantizedTensors(NamedTuple):
    """The tensors of a Hugging Face folder, its `quantization_config`, notes for users, and the memory needed."""

    tensors: list[Planned]
    settings: dict[str, Any]
    notes: list[str]
    need: MemoryNeed


def quantized(tensors: Iterable[Planned], how: str, config: Mapping[str, Any]) -> QuantizedTensors:
    """A Hugging Face folder with its linear layers quantized.

    `config` is the model's config. Raises ReshardError if nothing loads such weights for this model.
    """
    storage, tensors = STORAGES[how], list(tensors)
    if (how == "mxfp4") != (config.get("model_type") == "gpt_oss"):
        raise _not_of_this_model(how, config)
    stacked = {t.name for t in tensors if _is_stacked(t)}
    odd = [t for t in tensors if t.name in stacked and (how != "mxfp4" or t.shape[1] % storage.blocks[1])]
    chosen = frozenset(stacked if how == "mxfp4" else (t.name for t in tensors if _is_linear(t)))
    if how == "nvfp4":
        odd += [t for t in tensors if t.name in chosen and t.shape[-1] % storage.blocks[1]]
    if odd or not chosen:
        raise _nothing_fits(how, odd)
    stored = [*storage.all_planned(tensors, chosen)]
    others = [t for t in tensors if t.name not in chosen]
    settings = (
        nvfp4.settings_of(others, chosen, _inner)
        if how == "nvfp4"
        else _settings(how, storage.blocks, others)
    )
    weights = [t for t in tensors if t.name in chosen]
    need = storage.need({(t.dtype, t.shape): t.name for t in weights})
    return QuantizedTensors(stored, settings, _notes(how, storage.blocks, weights), need)


def _is_cut(size: int, block: int) -> bool:
    """Whether the last block is smaller: a reader that divides the weight by its scales misplaces the block borders."""
    return size > block and size % block > 0


def _notes(how: str, blocks: tuple[int, int], chosen: list[Planned]) -> list[str]:
    notes = [f"{len(chosen)} weights are quantized to {how}"]
    tall, wide = blocks
    if edges := [t.name for t in chosen if _is_cut(t.shape[-2], tall) or _is_cut(t.shape[-1], wide)]:
        notes.append(
            f"{listed(edges, 1)}: the last block is smaller than {tall} × {wide}, as in DeepSeek's own folders; "
            "transformers 5.23 cannot dequantize it on a CPU"
        )
    return notes


def _settings(how: str, blocks: tuple[int, int], others: Iterable[Planned]) -> dict[str, Any]:
    """`quantization_config` for config.json; `others` are the tensors that stay unquantized."""
    if how == "mxfp4":  # in OpenAI's words
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        return {"modules_to_not_convert": kept, "quant_method": "mxfp4"}
    matrices = (
        t.name.removesuffix(".weight") for t in others if len(t.shape) > 1 and t.name.endswith(".weight")
    )
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": list(dict.fromkeys([*matrices, "lm_head"])),
        "quant_method": "fp8",
        **({"scale_fmt": "ue8m0"} if how == "fp8-ue8m0" else {}),
        "weight_block_size": list(blocks),
    }


def _not_of_this_model(how: str, config: Mapping[str, Any]) -> ReshardError:
    rule = "transformers loads gpt-oss in MXFP4 (experts only), and other models in FP8 or NVFP4"
    return ReshardError(
        "quantization-method-differs",
        "this model is not stored in this format",
        rule=rule,
        found=f"--quantize {how}, model_type {config.get('model_type')}",
        remedy=f"pass --quantize {'fp8' if how == 'mxfp4' else 'mxfp4'}",
    )


def _nothing_fits(how: str, odd: list[Planned]) -> ReshardError:
    stacked = [tensor for tensor in odd if len(tensor.shape) > 2]
    if stacked and how != "mxfp4":
        return ReshardError(
            "stacked-experts-fp8-unsupported",
            f"experts that are stacked in one tensor cannot be quantized to {how}",
            tensor=listed([tensor.name for tensor in stacked], 1),
            rule="transformers 5.23 only loads FP8 experts that are separate tensors, and misreads the scales of "
            "others; compressed-tensors stores NVFP4 of two-dimensional weights only",
            remedy="leave out --quantize",
        )
    if odd:
        return ReshardError(
            "weight-not-divisible-into-blocks",
            "the rows of a weight are not divisible into blocks",
            tensor=listed([tensor.name for tensor in odd], 1),
            rule="MXFP4 has one scale for 32 consecutive elements of a row, and NVFP4 one for 16",
            found=str(list(odd[0].shape)),
            remedy="leave out --quantize",
        )
    return ReshardError(
        "nothing-to-quantize",
        "no weight can be quantized",
        rule="--quantize changes the linear layers of decoder layers: two-dimensional floats that are called "
        "model.layers.N.….weight",
        found=f"none of that kind for --quantize {how}",
        remedy="leave out --quantize",
    )
