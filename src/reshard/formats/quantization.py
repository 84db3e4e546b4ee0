"""The quantized weights of a checkpoint: which tensors make up one weight, by the schemes, and the settings of all.

Nothing here reads or changes them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError, listed
from reshard.base.merged_problems import one_for_all
from reshard.formats.module_quantization import MODELOPT
from reshard.formats.quantization_schemes import (
    FOLDED,
    FP4_DTYPES,
    FP8_DTYPES,
    METHODS,
    PLAIN_DTYPES,
    SCHEMES,
    QuantizationScheme,
    Shape,
    Wide,
)

FOREIGN_FORMATS = ("marlin-24", "sparse-bitmask", "sparse-24-bitmask")
"""Formats of compressed-tensors that follow none of the schemes."""

WEIGHT_NAMES = ("weight", "gate_up_proj", "down_proj")
"""Names of weights that may be quantized: that of a linear layer, and those of stacked experts."""

OF_ACTIVATIONS = (
    *(f"{weight}_input_scale" for weight in WEIGHT_NAMES),
    *("input_scale", "input_scale_ub", "input_global_scale", "input_zero_point", "activation_scale"),
    *("output_scale", "output_zero_point", "q_scale", "k_scale", "v_scale"),
)
"""Scales that belong to no weight."""

AMBIGUOUS_ROLES = ({"scale"}, {"scales"}, {"g_idx"}, {"{}_shape"}, *({role} for role in FOLDED))
"""Roles whose names plain models may have, too: alone they do not indicate a quantized weight, except exponents."""

_MODULES = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude")
"""Settings that list the modules that are not quantized."""

UNTOLD = (
    "the weights are quantized, but config.json has no quantization_config: they would load as plain numbers"
)


class _WeightPart(NamedTuple):
    """A tensor whose name ends in `end` is the part `role` of the weight whose name ends in `weight` instead."""

    end: str
    role: str
    weight: str


def _weight_parts() -> Iterator[tuple[str, _WeightPart]]:
    """The parts in all schemes, by the last component of their names."""
    for scheme in SCHEMES:
        for role in (scheme.values, *scheme.beside, *scheme.more):
            for weight in WEIGHT_NAMES:
                if role != "{}" and (weight == "weight" or ("{}" in role and "." not in role)):
                    local = role.format(weight)
                    yield local.rpartition(".")[2], _WeightPart(f".{local}", role, f".{weight}")


_PARTS = dict(_weight_parts())
"""By the last component of the tensor name."""

_SHARD = re.compile(r"(?<=\.ngram_embedding)\.shard_\d+(?=\.weight$)")
"""The part of the name of a shard of a table that has one scale. Source: `ple.py` of mcore-bridge 1.6.5."""
_VALUES = {scheme.values for scheme in SCHEMES}
_SMALL = {*FP8_DTYPES, *FP4_DTYPES}


class QuantizedWeight(NamedTuple):
    """A quantized weight: the tensor with its elements, and the bits of each."""

    scheme: QuantizationScheme
    values: str
    bits: int

    def wide(self, tensor: Tensor) -> Wide:
        return lambda items: items * 8 * tensor.dtype.itemsize // self.bits

    def shape(self, tensor: Tensor) -> Shape | None:
        """The shape of the weight whose values `tensor` has, or None if it cannot be computed."""
        return self.scheme.shape and self.scheme.shape(tensor.shape, self.wide(tensor))

    def fits(self, tensor: Tensor, wanted: Shape) -> bool:
        """Whether `tensor` can store a weight of the shape `wanted`; the last item of a row may be padded."""
        shape, wide = self.shape(tensor), self.wide(tensor)
        if shape is None:
            shape, wanted = (wide(tensor.view.numel),), (prod(wanted),)
        if shape == wanted:
            return True
        near = (size <= there < size + wide(1) for there, size in zip(shape, wanted, strict=False))
        return len(shape) == len(wanted) and all(near)


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint is quantized: `settings` are `quantization_config` of config.json, if it has one.

    `weights` are those that follow a scheme, by their names in the plain model; empty if the method is unknown.
    `beside` are the tensors that are not parameters, `incomplete` the weights that lack a part.
    """

    settings: Mapping[str, Any]
    weights: Mapping[str, QuantizedWeight]
    beside: frozenset[str] = frozenset()
    incomplete: frozenset[str] = frozenset()

    @property
    def method(self) -> str:
        """The method according to config.json, or else the schemes found by tensor names."""
        schemes = dict.fromkeys(weight.scheme.name for weight in self.weights.values())
        return str(self.settings.get("quant_method") or ", ".join(schemes))

    @property
    def arithmetic(self) -> dict[str, Any]:
        """The settings of values and scales, without those that select modules."""
        return {key: value for key, value in self.settings.items() if key not in _MODULES}

    def __str__(self) -> str:
        return ", ".join([self.method, *_details(self.settings), *self._schemes])

    @property
    def _schemes(self) -> list[str]:
        """How many weights follow each scheme, if they follow several."""
        counts = Counter(weight.scheme.name for weight in self.weights.values())
        return [f"{count} weights in {name}" for name, count in counts.items()] if len(counts) > 1 else []

    def as_dict(self) -> dict[str, Any]:
        """For `inspect --json`; null for the number of weights if the method is unknown."""
        return {"method": self.method, "how": str(self), "weights": len(self.weights) or None}

    def parameters(self, tensors: Mapping[str, Tensor]) -> int:
        """The number of elements of all weights, quantized or not."""
        packed = {weight.values: weight for weight in self.weights.values()}
        return sum(
            packed[name].wide(tensor)(tensor.view.numel) if name in packed else tensor.elements
            for name, tensor in tensors.items()
            if name not in self.beside
        )

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All weights under their names in the plain model; a quantized one is the tensor with its values."""
        quantized = {name: tensors[weight.values] for name, weight in self.weights.items()}
        parts = self.beside | {weight.values for weight in self.weights.values()}
        return {name: tensor for name, tensor in tensors.items() if name not in parts} | quantized


def _details(settings: Mapping[str, Any]) -> Iterator[str]:
    """The settings of common tools, as text."""
    yield from (str(settings[key]) for key in ("format", "fmt", "quant_algo") if settings.get(key))
    blocks = settings.get("weight_block_size")
    if isinstance(blocks, list):
        yield f"blocks of {' × '.join(map(str, blocks))}"
    if "mixed" in str(settings.get("format") or settings.get("quant_algo")).lower():
        return
    if bits := _told_bits(settings):
        yield f"{bits} bits"
    group = (
        settings.get("group_size") or settings.get("q_group_size") or of_first_group(settings, "group_size")
    )
    if isinstance(group, int) and group > 0:
        yield f"groups of {group}"


def _told_bits(settings: Mapping[str, Any]) -> int | None:
    told = settings.get("bits") or settings.get("w_bit") or of_first_group(settings, "num_bits")
    if isinstance(told, int) and 0 < told <= 8:
        return told
    return next((bits for bits in (4, 8) if settings.get(f"load_in_{bits}bit") is True), None)


def of_first_group(settings: Mapping[str, Any], key: str) -> Any:
    """A setting of the weights in compressed-tensors' first group."""
    groups = settings.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = group.get("weights") if isinstance(group, dict) else None
    return weights.get(key) if isinstance(weights, dict) else None


BLOCK_METHOD = "fp8"
"""The method whose settings have the size of blocks."""


def blocks_told(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """How many rows and columns of a weight share a scale, if FP8 settings define it."""
    told = settings.get("weight_block_size")
    if isinstance(told, (list, tuple)) and len(told) == 2 and all(isinstance(n, int) and n > 0 for n in told):
        return told[0], told[1]
    return None


_SETTINGS = ("quantization_config", "compression_config")


def settings_of(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The quantization settings in config.json; those of a multimodal model may be in its text config."""
    config = config or {}
    for part in (config, config.get("text_config")):
        for key in _SETTINGS:
            if isinstance(part, Mapping) and isinstance(part.get(key), Mapping):
                return _flat(part[key])
    return {}


def of_modelopt(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings in ModelOpt's own file, `hf_quant_config.json`, as they are in a config.json."""
    return _flat({**content, "quant_method": MODELOPT})


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of which ModelOpt may nest a part."""
    inner = settings.get("quantization")
    if settings.get("quant_method") != MODELOPT or not isinstance(inner, Mapping):
        return dict(settings)
    outer = {key: value for key, value in settings.items() if key != "quantization"}
    return {"ignore": inner.get("exclude_modules") or [], **inner, **outer}


EXPERT_DTYPE = "expert_dtype"
"""Where config.json of DeepSeek-V4 says that its experts are in FP4, beside the settings of all weights."""

MLX_SETTINGS = "quantization"
"""Where mlx-lm looks for its settings, which have no `quant_method`; it writes them twice."""


def settings_as_told(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json for quantization settings."""
    beside = {key: value for key, value in settings.items() if key == EXPERT_DTYPE}
    settings = {key: value for key, value in settings.items() if key != EXPERT_DTYPE}
    told = {**beside, "quantization_config": settings}
    return told if "quant_method" in settings else {MLX_SETTINGS: settings, **told}


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model with plain weights."""
    quantized = (*_SETTINGS, MLX_SETTINGS, EXPERT_DTYPE)
    plain = {key: value for key, value in config.items() if key not in quantized}
    if isinstance(plain.get("text_config"), Mapping):
        plain["text_config"] = {k: v for k, v in plain["text_config"].items() if k not in _SETTINGS}
    return plain


def find(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None, file: str
) -> tuple[Quantization | None, list[Problem]]:
    """How tensors with Hub names are quantized (None if all are plain), and which weights lack a part.

    `config` may describe quantization although the weights are plain: that of a base often does.
    """
    settings = settings_of(config)
    groups, beside = _grouped(tensors, told=bool(settings))
    if not groups:
        plain = not settings or all(tensor.dtype.name in PLAIN_DTYPES for tensor in tensors.values())
        return (None if plain else Quantization(settings, {})), []
    weights, problems = {}, {}
    method = settings.get("quant_method") or None

    @cache
    def schemes(roles: frozenset[str]) -> list[QuantizationScheme]:
        return sorted(schemes_with(roles), key=lambda each: method not in each.methods)

    for name, parts in groups.items():
        scheme = next((each for each in schemes(frozenset(parts)) if each.has(parts, tensors)), None)
        if scheme:
            weights[name] = QuantizedWeight(
                scheme, parts[scheme.values], _bits(scheme, parts, tensors, settings)
            )
        else:
            problems[name] = _incomplete(name, parts, tensors, settings)
    if problems and not _is_known(settings):
        return Quantization(settings, {}), []
    found = Quantization(settings, weights, frozenset(beside), frozenset(problems))
    return found, one_for_all(problems.values(), groups, file)


def _is_known(settings: Mapping[str, Any]) -> bool:
    """Whether weights with these settings follow `SCHEMES`, so that one that does not is incomplete."""
    method, sparsity = settings.get("quant_method") or None, settings.get("sparsity_config")
    formats = [each.get("format") for each in (settings, sparsity) if isinstance(each, dict)]
    return method in METHODS and not any(each in FOREIGN_FORMATS for each in formats)


def _grouped(tensors: Mapping[str, Tensor], *, told: bool) -> tuple[dict[str, dict[str, str]], set[str]]:
    """The parts of each quantized weight, by role, and the names of all tensors that are not parameters."""
    groups: dict[str, dict[str, str]] = {}
    small, of_activations = set(), set()
    for name, tensor in tensors.items():
        last = name.rpartition(".")[2]
        part = _PARTS.get(last)
        if part and name.endswith(part.end):
            groups.setdefault(name[: -len(part.end)] + part.weight, {})[part.role] = name
        elif last in WEIGHT_NAMES and tensor.dtype.name in _SMALL and (told or _SHARD.search(name)):
            small.add(name)
        if last in OF_ACTIVATIONS:
            of_activations.add(name)
    exponents = {name for name, tensor in tensors.items() if tensor.dtype.name == "float8_e8m0fnu"}
    groups = {
        name: parts
        for name, parts in groups.items()
        if name in small or parts.keys() not in AMBIGUOUS_ROLES or not exponents.isdisjoint(parts.values())
    }
    for name in small:
        groups.setdefault(name, {})
    beside = {name for parts in groups.values() for role, name in parts.items() if role not in _VALUES}
    if groups:
        beside |= of_activations
    for name in groups.keys() & tensors.keys():
        groups[name]["{}"] = name
    return _by_shard(groups), beside


def _by_shard(groups: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The same with the scale of a table that is stored in shards as a part of each of them."""
    wholes = {name: _SHARD.sub("", name) for name in groups if ".shard_" in name and _SHARD.search(name)}
    shared = {*wholes.values()}
    alone = {name: parts for name, parts in groups.items() if name not in shared}
    return {**alone, **{name: {**groups.get(whole, {}), **groups[name]} for name, whole in wholes.items()}}


@cache
def schemes_with(roles: frozenset[str]) -> tuple[QuantizationScheme, ...]:
    """The schemes in which a weight has parts of these roles."""
    return tuple(
        each
        for each in SCHEMES
        if {each.values, *each.beside} <= roles <= {each.values, *each.beside, *each.more}
    )


def _bits(
    scheme: QuantizationScheme,
    parts: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
) -> int:
    if scheme.bits is not None:
        return scheme.bits or 8 * tensors[parts[scheme.values]].dtype.itemsize
    if "qzeros" in parts:  # packed like the values, and as many as there are scales
        zeros, scales = (tensors[parts[role]].view.numel for role in ("qzeros", "scales"))
        return max(1, 32 * zeros // max(1, scales))
    return _told_bits(settings) or 4


def _incomplete(
    name: str, parts: Mapping[str, str], tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> Problem:
    """The problem of an incomplete weight, by the scheme that is closest to it."""
    method = settings.get("quant_method")

    def distance(scheme: QuantizationScheme) -> tuple[int, int, bool]:
        needed = {scheme.values, *scheme.beside}
        foreign = parts.keys() - needed - {*scheme.more}
        return len(foreign), len(needed - parts.keys()), not scheme.of_method(settings)

    def names(roles: Iterable[str]) -> str:
        return ", ".join(role.format(name.rpartition(".")[2]) for role in roles)

    scheme = min(SCHEMES, key=distance)
    needed = (scheme.values, *scheme.beside)
    lacking = names(role for role in needed if role not in parts)
    there = sorted(parts.values())
    stored_by = f"{method} ({scheme.name})" if method else scheme.name
    return Problem(
        "quantized-weight-incomplete",
        "a quantized weight is incomplete",
        tensor=name,
        file=tensors[there[0]].file,
        rule=f"{stored_by} stores a weight as {names(needed)}",
        expected=lacking or f"elements of {' or '.join(scheme.dtypes)}",
        found=", ".join(f"{part.rpartition('.')[2]} ({tensors[part].dtype})" for part in there),
        remedy="copy or download the files again: the values are meaningless without their scales",
    )


def part_of(name: str, role: str) -> str:
    """The name of the tensor with the part `role` of the weight `name`."""
    module, _, local = _SHARD.sub("", name).rpartition(".")
    return f"{module}.{role.format(local)}"


def refusal(found: Quantization, path: Path, wanted: str | None = None) -> ReshardError:
    """The error if plain weights are required; `wanted` says for what."""
    names = list(found.weights)
    return ReshardError(
        "weights-quantized",
        "the weights are quantized",
        tensor=listed(names, 1) if names else None,
        file=str(path),
        rule="reshard dequantizes the schemes marked in docs/formats.md and copies others unchanged",
        found=f"{found}; {wanted}" if wanted else str(found),
        remedy="dequantize the model to bfloat16 first, as its publisher describes; to copy it, "
        "pass --to huggingface without --dtype",
    )
