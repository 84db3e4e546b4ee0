"""Which weights of a folder `--quantize` quantizes, how they are stored, and what config.json says of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from reshard.algebra.dtypes import DType, castable
from reshard.algebra.tensors import Tensor, least_memory
from reshard.algebra.views import View
from reshard.base.errors import ReshardError, listed
from reshard.codecs import packed_ints
from reshard.codecs.encoded_blocks import (
    E8M0,
    FP8,
    FP8_E8M0,
    MXFP4,
    MXFP4_E8M0,
    MXFP6,
    MXFP8,
    UE8M0,
    QuantizationMethod,
    QuantizedScales,
    QuantizedValues,
)
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.quantization import EXPERT_DTYPE, blocks_told, part_of
from reshard.formats.quantization_schemes import STACKED_EXPERTS, QuantizationScheme
from reshard.model import compressed_settings
from reshard.model.nvfp4 import Nvfp4
from reshard.transfer.memory_budget import MemoryNeed, most
from reshard.transfer.plan import Planned


class QuantizedStorage(NamedTuple):
    """The storage of weights for one value of `--quantize`.

    A weight becomes tensors with these `roles` in its module, packed integers if there is no `method`. The elements of
    each of `blocks` share a scale. Weights may be `stacked` experts. `experts` is how routed experts are stored, if
    that is different.
    """

    method: QuantizationMethod | None
    roles: tuple[str, ...]
    blocks: tuple[int, int]
    stacked: bool = False
    experts: QuantizedStorage | None = None

    def of(self, name: str) -> QuantizedStorage:
        """How one weight is stored."""
        return self.experts if self.experts and is_expert(name) else self

    def parts(self, name: str, weight: Tensor) -> tuple[Tensor, ...]:
        """The values and the scales of a weight [..., rows, columns]; of stacked experts, [expert, in, out]."""
        method, (tall, wide) = self.method, self.blocks
        if method is None:
            return packed_ints.packed_ints(name, weight)
        if self.stacked:
            weight = Tensor(weight.dtype, weight.view.permute(0, 2, 1))
        *outer, rows, columns = weight.shape
        grid = (*outer, -(-rows // tall), -(-columns // wide))
        values = QuantizedValues(name, weight, method, tall, wide)
        scales = QuantizedScales(name, weight, method, tall, wide)
        shape = (*outer, rows, columns * method.bits // 8)
        shape = (*grid, wide * method.bits // 8) if self.stacked else shape
        return (
            Tensor(values.dtype, View.of(values, *shape)),
            Tensor(scales.dtype, View.of(scales, *grid)),
        )

    def need(self, names: Mapping[tuple[DType, tuple[int, ...]], str]) -> MemoryNeed:
        """The least memory for quantizing weights; `names` has an example name for each dtype and shape."""
        return most(
            MemoryNeed(least_memory(part.view), name)
            for (dtype, shape), name in names.items()
            for part in self.of(name).parts(name, Tensor(dtype, View.of(None, *shape)))
        )

    def planned(self, tensor: Planned) -> Iterator[Planned]:
        """The tensors stored instead of a weight; its view is compiled when one of them is written."""
        nothing = Tensor(tensor.dtype, View.of(None, *tensor.shape))
        for index, part in enumerate(self.parts(tensor.name, nothing)):
            name = part_of(tensor.name, self.roles[index])
            yield Planned(name, part.dtype, part.shape, self._compiler(tensor, index))

    def all_planned(self, tensors: Iterable[Planned], chosen: frozenset[str]) -> Iterator[Planned]:
        """All tensors of a folder, with those stored instead of the `chosen`."""
        for tensor in tensors:
            yield from self.of(tensor.name).planned(tensor) if tensor.name in chosen else (tensor,)

    def _compiler(self, tensor: Planned, index: int) -> Callable[[], View]:
        return lambda: self.parts(tensor.name, Tensor(tensor.dtype, tensor.source()))[index].view


_EXPERT = re.compile(r"\.experts\.\d+\.")


def is_expert(name: str) -> bool:
    """Whether a tensor is one of a single routed expert."""
    return bool(_EXPERT.search(name))


_INVERSE = ("{}", "{}_scale_inv")
_OF_DEEPSEEK = ("{}", "scale")
_MXFP4_ROWS = QuantizedStorage(MXFP4_E8M0, _OF_DEEPSEEK, (1, 32))
_MXFP4_STACKED = QuantizedStorage(MXFP4, ("{}_blocks", "{}_scales"), (1, 32), stacked=True)
STORAGES: dict[str, QuantizedStorage | Nvfp4] = {
    "fp8": QuantizedStorage(FP8, _INVERSE, (128, 128)),
    "fp8-ue8m0": QuantizedStorage(UE8M0, _INVERSE, (128, 128)),
    "fp8-mxfp4": QuantizedStorage(FP8_E8M0, _OF_DEEPSEEK, (128, 128), experts=_MXFP4_ROWS),
    "int4": QuantizedStorage(None, ("{}_packed", "{}_scale", "{}_shape"), (1, packed_ints.GROUP)),
    "mxfp4": _MXFP4_STACKED,
    "mxfp6": QuantizedStorage(MXFP6, ("{}_packed", "{}_scale"), (1, 32)),
    "mxfp8": QuantizedStorage(MXFP8, ("{}", "{}_scale"), (1, 32)),
    "nvfp4": Nvfp4(),
}
"""The values of `--quantize`."""

_MODELS = {"mxfp4": "gpt_oss", "fp8-mxfp4": "deepseek_v4"}
"""The only model that is stored so, by its `model_type`."""


class StoredWeight(NamedTuple):
    """A quantized weight of a checkpoint, and how it is stored."""

    storage: QuantizedStorage
    values: Tensor
    scales: Tensor


def stored_weights(checkpoint: Checkpoint) -> dict[str, StoredWeight]:
    """The weights that are stored as `--quantize` does, with blocks of any size, by name."""
    quantization = checkpoint.quantization
    result = {}
    for name, weight in quantization.weights.items() if quantization else ():
        scales = checkpoint.tensors[part_of(name, weight.scheme.beside[0])]
        storage = _storage(quantization.settings, weight.scheme, scales.dtype) if quantization else None
        if storage and storage.method and scales.dtype == storage.method.stored:
            result[name] = StoredWeight(storage, checkpoint.tensors[weight.values], scales)
    return result


def _storage(
    settings: Mapping[str, Any], scheme: QuantizationScheme, scales: DType
) -> QuantizedStorage | None:
    """The storage that `settings` describe, if `--quantize` has it."""
    if scheme is STACKED_EXPERTS:
        return _MXFP4_STACKED
    blocks = blocks_told(settings)
    if settings.get("quant_method") != "fp8" or not blocks:
        return None
    if scheme.name == "MXFP4":
        return _MXFP4_ROWS
    method = UE8M0 if settings.get("scale_fmt") == "ue8m0" else FP8
    return QuantizedStorage(FP8_E8M0 if scales == E8M0 else method, _INVERSE, blocks)


_LAYER = re.compile(r"(?:(?:model|language_model|text_model|llm|thinker|mtp)\.)*(?:layers|mtp)\.\d+\.(.+)")
"""Names of decoder layers, also of multi-token prediction, excluding those of towers and talkers."""

_UNQUANTIZED_MODULES = {
    *("gate", "router", "shared_expert_gate", "eh_proj", "embed_tokens", "shared_head", "conv1d"),
    *("in_proj_a", "in_proj_b", "in_proj_ba", "weights_proj", "compressor", "markov_head", "confidence_head"),
    *("tok_emb", "head"),
}
"""Modules of a layer that DeepSeek, Qwen, MiniMax and Zhipu leave unquantized in their FP8 folders."""

_STACKED = ("experts.gate_up_proj", "experts.down_proj")


def name_in_layer(name: str) -> str | None:
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


def _is_routed(tensor: Planned) -> bool:
    """Whether a tensor is the weight of a single routed expert."""
    return _is_linear(tensor) and is_expert(tensor.name)


_CHOSEN: dict[str, Callable[[Planned], bool]] = {"mxfp4": _is_stacked, "int4": _is_routed}
"""Which weights are quantized, by the value of `--quantize`, unless these are all linear layers."""


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
    model = config.get("model_type")
    if _MODELS.get(how, model) != model or (model == "gpt_oss" and how != "mxfp4"):
        raise _not_of_this_model(how, config)
    fits = _CHOSEN.get(how, _is_linear)
    weights = [t for t in tensors if fits(t)]
    odd = [t for t in tensors if _is_stacked(t) and how != "mxfp4"]
    odd += [t for t in weights if _is_odd(t, storage.of(t.name).blocks)]
    if odd or not weights:
        raise _nothing_fits(how, odd)
    chosen = frozenset(t.name for t in weights)
    stored = [*storage.all_planned(tensors, chosen)]
    others = [t for t in tensors if t.name not in chosen]
    settings = (
        compressed_settings.settings_of(how, others, chosen, name_in_layer)
        if how in compressed_settings.FORMATS
        else _settings(how, storage.blocks, others)
    )
    kinds = {(is_expert(t.name), t.dtype, t.shape): t.name for t in weights}
    need = most(storage.need({(dtype, shape): name}) for (_, dtype, shape), name in kinds.items())
    return QuantizedTensors(stored, settings, [*_notes(how, storage, weights)], need)


def _is_odd(weight: Planned, blocks: tuple[int, int]) -> bool:
    """Whether the rows of a matrix, or the inputs of stacked experts [expert, in, out], do not end with a block."""
    return blocks[0] == 1 and weight.shape[1] % blocks[1] > 0


def _is_cut(size: int, block: int) -> bool:
    """Whether the last block is smaller: a reader that divides the weight by its scales misplaces the block borders."""
    return size > block and size % block > 0


def _notes(how: str, storage: QuantizedStorage | Nvfp4, chosen: list[Planned]) -> Iterator[str]:
    yield f"{len(chosen)} weights are quantized to {how}"
    tall, wide = storage.blocks
    alike = [t for t in chosen if storage.of(t.name).blocks == storage.blocks]
    if edges := [t.name for t in alike if _is_cut(t.shape[-2], tall) or _is_cut(t.shape[-1], wide)]:
        yield (
            f"{listed(edges, 1)}: the last block is smaller than {tall} × {wide}, as in DeepSeek's own folders; "
            "transformers 5.23 cannot dequantize it on a CPU"
        )


def _settings(how: str, blocks: tuple[int, int], others: Iterable[Planned]) -> dict[str, Any]:
    """`quantization_config` for config.json; `others` are the tensors that stay unquantized."""
    if how == "mxfp4":  # in OpenAI's words
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        return {"modules_to_not_convert": kept, "quant_method": "mxfp4"}
    if how == "fp8-mxfp4":  # in DeepSeek's words
        told = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0"}
        return {**told, "weight_block_size": list(blocks), EXPERT_DTYPE: "fp4"}
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
    usual = "mxfp4" if config.get("model_type") == "gpt_oss" else "fp8"
    return ReshardError(
        "quantization-method-differs",
        "this model is not stored in this format",
        rule="transformers loads gpt-oss in MXFP4 (experts only), and other models in FP8 or NVFP4; "
        "DeepSeek-V4 only in FP8 with experts in MXFP4",
        found=f"--quantize {how}, model_type {config.get('model_type')}",
        remedy=f"pass --quantize {usual}",
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
            rule="NVFP4 has one scale for 16 consecutive elements of a row; int4, MXFP4, MXFP6 and MXFP8 one for 32",
            found=str(list(odd[0].shape)),
            remedy="leave out --quantize",
        )
    return ReshardError(
        "nothing-to-quantize",
        "no weight can be quantized",
        rule="--quantize changes the linear layers of decoder layers: two-dimensional floats that are called "
        "model.layers.N.….weight; --quantize int4 only those of single experts",
        found=f"none of that kind for --quantize {how}",
        remedy="leave out --quantize",
    )
