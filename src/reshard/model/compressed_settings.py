"""What config.json says of quantized weights in the words of compressed-tensors 0.20."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable
from typing import Any

from reshard.transfer.plan import Planned

_IN_GROUPS = {"dynamic": False, "group_size": 32, "strategy": "group", "symmetric": True}
_EXPONENTS = {"scale_dtype": "torch.uint8", "type": "float", "zp_dtype": "torch.uint8"}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "nvfp4": (
        "nvfp4-pack-quantized",
        {
            "dynamic": False,
            "group_size": 16,
            "num_bits": 4,
            "scale_dtype": "torch.float8_e4m3fn",
            "strategy": "tensor_group",
            "symmetric": True,
            "type": "float",
        },
    ),
    "mxfp6": ("mxfp6-pack-quantized", {**_IN_GROUPS, **_EXPONENTS, "num_bits": 6}),
    "mxfp8": ("mxfp8-quantized", {**_IN_GROUPS, **_EXPONENTS, "num_bits": 8}),
    "int4": ("pack-quantized", {**_IN_GROUPS, "num_bits": 4, "type": "int"}),
}
"""The format, and how weights are quantized, by the value of `--quantize`."""


def settings_of(
    how: str, others: Iterable[Planned], chosen: Iterable[str], inner: Callable[[str], str | None]
) -> dict[str, object]:
    """`quantization_config` for a value of `--quantize`; `others` are the tensors that stay unquantized.

    `inner` returns the rest of a name within its decoder layer. Names in config.json are those of modules in memory,
    which may have other prefixes, so that modules are named by their ends.
    """
    chosen = frozenset(chosen)
    ends = {inner(name) for name in chosen}
    matrices = [t.name for t in others if len(t.shape) > 1 and t.name.endswith(".weight")]
    ignored = dict.fromkeys(["lm_head", *(_pattern(name, inner(name), ends, chosen) for name in matrices)])
    kind, weights = FORMATS[how]
    group = {"format": kind, "input_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group},
        "format": kind,
        "ignore": [*ignored],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


_OUTER = ("model", "language_model", "text_model", "llm", "thinker")
"""Prefixes that differ between the Hub and memory."""


def _pattern(name: str, rest: str | None, ends: Container[str | None], chosen: Iterable[str]) -> str:
    """What names the module of a weight in memory, and no chosen one: its end in a layer, or its tower."""
    module = name.removesuffix(".weight")
    if rest and rest not in ends:
        return rf"re:.*\.{re.escape(rest.removesuffix('.weight'))}$"
    parts = module.split(".")
    while parts[0] in _OUTER and len(parts) > 1:
        parts.pop(0)
    if len(parts) > 1 and not any(f".{parts[0]}." in f".{each}" for each in chosen):
        return rf"re:.*{re.escape(parts[0])}\..*"
    return module if parts == ["lm_head"] else rf"re:.*{re.escape('.'.join(parts))}$"
