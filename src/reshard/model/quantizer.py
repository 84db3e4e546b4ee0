"""Which weights of a folder `--quantize` quantizes, how they are stored, and what config.json says of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from reshard.algebra.dtypes import DType
from reshard.algebra.tensors import Tensor, least_memory
from reshard.algebra.views import View
from reshard.base.errors import ReshardError, listed
from reshard.codecs.encoded_blocks import (
    FP8,
    MXFP4,
    UE8M0,
    QuantizationMethod,
    QuantizedScales,
    QuantizedValues,
)
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.quantization import blocks_told, part_of
from reshard.model import nvfp4
from reshard.model.nvfp4 import Nvfp4
from reshard.transfer.elements import castable
from reshard.transfer.memory_budget import MemoryNeed, most
from reshard.transfer.plan import Planned


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
            MemoryNeed(least_memory(part.view), name)
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
    quantization = checkpoint.quantization
    result = {}
    for name, weight in quantization.weights.items() if quantization else ():
        storage = _storage(quantization.settings, weight.scheme.name) if quantization else None
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
        nvfp4.settings_of(others, chosen, name_in_layer)
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
