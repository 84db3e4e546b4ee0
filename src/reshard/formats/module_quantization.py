"""What the settings of ModelOpt and compressed-tensors say of each module: how its weight is quantized, if at all.

Sources: `utils/match.py` and `quantization/lifecycle/apply.py` of compressed-tensors 0.20, `export/quant_utils.py` of
ModelOpt 0.47. What is stored decides how a weight is computed; it is compared with what is told here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property
from typing import Any

MODELOPT, COMPRESSED_TENSORS = "modelopt", "compressed-tensors"

_FLOATS: dict[tuple[Any, Any], str] = {
    (8, None): "FP8",
    (4, 16): "NVFP4",
    (4, 32): "MXFP4",
    (6, 32): "MXFP6",
}
"""The schemes of floats in compressed-tensors, by bits and by the size of groups, if that tells them apart."""

_ALGORITHMS = {
    **dict.fromkeys(("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "MXFP8"), "FP8"),
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "NVFP4_AWQ", "NVFP4_SVD"), "NVFP4"),
    **dict.fromkeys(("W8A16", "W8A8_SQ_PER_CHANNEL"), "int8"),
}
"""The schemes behind each `quant_algo` of ModelOpt."""

_PLAIN_NAME = re.compile(r"[\w.]+")

_EXCLUDED = ("ignore", "exclude_modules")


@dataclass(frozen=True, eq=False)
class ModuleQuantization:
    """How settings describe the weight of a module.

    `schemes` are the names of the schemes by which it can be stored; empty if nothing is told. `args` are the settings
    of its values and scales, `format` and `how` name them.
    """

    schemes: frozenset[str] = frozenset()
    args: Mapping[str, Any] = field(default_factory=dict)
    format: str | None = None
    how: str = ""


NOT_TOLD = ModuleQuantization()
NOT_QUANTIZED = ModuleQuantization(frozenset({"plain"}), how="not quantized")


class QuantizationSettings:
    """The settings of a checkpoint, by module."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._method = settings.get("quant_method")
        self._known: dict[str, ModuleQuantization] = {}
        self._excluded = _ModulePatterns(
            [each for key in _EXCLUDED for each in _strings(settings.get(key))],
            wildcards=self._method == MODELOPT,
        )

    def of(self, module: str) -> ModuleQuantization:
        """What is told of the weight of a module."""
        if self._method not in (MODELOPT, COMPRESSED_TENSORS):
            return NOT_TOLD
        if module not in self._known:
            self._known[module] = self._quantization_of(module)
        return self._known[module]

    def _quantization_of(self, module: str) -> ModuleQuantization:
        named = self._by_name(module)
        if named is None and self._excluded.has(module):
            return NOT_QUANTIZED
        return named or self._for_all

    def bits_of(self, module: str) -> int | None:
        """The bits of a module's values in GPTQ, AWQ and auto-round; None if a pattern may change them."""
        each = self._settings.get("extra_config")
        each = each if isinstance(each, Mapping) else {}
        if self._settings.get("dynamic") or any(not _PLAIN_NAME.fullmatch(str(name)) for name in each):
            return None
        own = each.get(module)
        bits = own.get("bits") if isinstance(own, Mapping) else None
        bits = bits or self._settings.get("bits") or self._settings.get("w_bit")
        return bits if isinstance(bits, int) else None

    @property
    def named(self) -> frozenset[str]:
        """The modules that are named one by one as quantized."""
        return frozenset(self._layers if self._method == MODELOPT else self._groups[0])

    def _by_name(self, module: str) -> ModuleQuantization | None:
        if self._method == MODELOPT:  # fused experts are one module there
            while module and module not in self._layers:
                module = module.rpartition(".")[0]
            return self._layers.get(module)
        exact, patterns, _ = self._groups
        if self._excluded.has(module):
            return None
        return exact.get(module) or next(
            (described for names, described in patterns if names.has(module)), None
        )

    @cached_property
    def _layers(self) -> dict[str, ModuleQuantization]:
        layers = self._settings.get("quantized_layers")
        kinds: dict[str, ModuleQuantization] = {}
        by_name = {}
        for name, each in layers.items() if isinstance(layers, Mapping) else ():
            key = repr(each)
            by_name[name] = kinds.setdefault(key, _of_modelopt(each if isinstance(each, Mapping) else {}))
        return by_name

    @cached_property
    def _groups(
        self,
    ) -> tuple[
        dict[str, ModuleQuantization],
        list[tuple[_ModulePatterns, ModuleQuantization]],
        list[tuple[str, ModuleQuantization]],
    ]:
        """The groups of compressed-tensors by names of modules, by patterns, and by classes."""
        exact, patterns, classes = {}, [], []
        groups = self._settings.get("config_groups")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            quantization = _of_group(group, self._settings.get("format"))
            for target in _strings(group.get("targets")) if isinstance(group, Mapping) else ():
                if target.startswith("re:"):
                    patterns.append((target, quantization))
                elif target.isidentifier():
                    classes.append((target, quantization))
                else:
                    exact[target] = quantization
        patterns.sort(key=lambda each: each[0])
        return (
            exact,
            [(_ModulePatterns([target]), quantization) for target, quantization in patterns],
            classes,
        )

    @cached_property
    def _for_all(self) -> ModuleQuantization:
        """What is told of modules that are not named; nothing if that depends on their classes."""
        if self._method == MODELOPT:
            return NOT_TOLD if self._layers else _of_modelopt(self._settings)
        classes = [quantization for _, quantization in self._groups[2]]
        return classes[0] if len(classes) == 1 else NOT_TOLD


def _strings(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _of_modelopt(settings: Mapping[str, Any]) -> ModuleQuantization:
    algorithm = str(settings.get("quant_algo"))
    scheme = _ALGORITHMS.get(algorithm)
    return ModuleQuantization(frozenset({scheme} if scheme else ()), settings, None, algorithm)


def _of_group(group: Any, kind: Any) -> ModuleQuantization:
    """What one of the groups of compressed-tensors describes; `kind` is the format of all groups."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        return NOT_TOLD
    kind = group.get("format") or (None if kind == "mixed-precision" else kind)
    numbers = [weights.get(key) for key in ("num_bits", "group_size")]
    bits, size = (each if isinstance(each, int) else None for each in numbers)
    if weights.get("type") == "float":
        names = {_FLOATS.get((bits, size)), _FLOATS.get((bits, None))}
    else:
        names = {"packed int"} if kind == "pack-quantized" else {"int8", "packed int"}
    known = frozenset(name for name in names if name)
    how = ", ".join(str(each) for each in (kind, f"{bits} bits", weights.get("type")) if each)
    return ModuleQuantization(known | {"rounded"} if known else known, weights, kind, how)


class _ModulePatterns:
    """Names and patterns of modules: `re:` and a regular expression, or `wildcards` as in shells."""

    def __init__(self, patterns: Iterable[str], *, wildcards: bool = False) -> None:
        self._names = frozenset(patterns)
        sources = [each.removeprefix("re:") for each in self._names if each.startswith("re:")]
        self._patterns = [compiled for each in sources if (compiled := compiled_pattern(each))]
        shells = [translate(each) for each in sorted(self._names) if "*" in each] if wildcards else []
        if shells:  # together, and translated so that they take little time on any name
            self._patterns.append(re.compile("|".join(shells)))

    def has(self, name: str) -> bool:
        return name in self._names or any(each.match(name) for each in self._patterns)


def compiled_pattern(pattern: str) -> re.Pattern[str] | None:
    """A regular expression that is fast on every name; None for others, and for what is none."""
    repeats = re.findall(r"(?<!\\)[*+{]", pattern)
    if len(pattern) > 400 or len(repeats) > 6 or re.search(r"\)[*+{]", pattern):
        return None
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return None
