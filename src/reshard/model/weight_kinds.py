"""What the values and scales of each quantized weight mean: a table of values, and how its scales are computed.

What is stored decides. If the settings of ModelOpt or compressed-tensors say otherwise, that is a problem.
"""

from __future__ import annotations

from collections.abc import Mapping

from reshard.algebra.dtypes import castable
from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem
from reshard.codecs.decoded_blocks import WeightKind
from reshard.formats.module_quantization import (
    COMPRESSED_TENSORS,
    MODELOPT,
    NOT_QUANTIZED,
    ModuleQuantization,
    QuantizationSettings,
)
from reshard.formats.quantization import Quantization, QuantizedWeight
from reshard.formats.quantization_schemes import PACKED_INT

_FORMATS = (
    *("float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized"),
    *("mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized"),
)
"""The formats of compressed-tensors whose weights are values times scales."""


def weight_kind(
    weight: QuantizedWeight, told: ModuleQuantization, found: Quantization, tensors: Mapping[str, Tensor]
) -> WeightKind | None:
    """What values and scales of a weight mean, if its method is one of its scheme; None if it is not known."""
    scheme, method = weight.scheme, found.settings.get("quant_method")
    table = scheme.tables.get(tensors[weight.values].dtype.name)
    if table is None:
        return None
    if scheme.applied:  # how they are computed does not depend on the settings
        return WeightKind(table, scheme.applied)
    if method == COMPRESSED_TENSORS and (told.format or found.settings.get("format")) not in _FORMATS:
        return None
    arithmetic = [told.args.get(key) for key in ("num_bits", "type", "symmetric")]
    if scheme is PACKED_INT and arithmetic != [4, "int", True]:  # integers from -8 on
        return None
    return WeightKind(table, rounded=method == MODELOPT)


def is_outer(tensor: Tensor) -> bool:
    """Whether a tensor can be the scale of a complete weight."""
    return tensor.view.numel == 1 and castable(tensor.dtype)


def disagreements(
    found: Quantization, tensors: Mapping[str, Tensor], settings: QuantizationSettings
) -> list[Problem]:
    """A problem for each weight of which the settings say otherwise than what is stored."""
    problems = []
    for name, weight in found.weights.items():
        told = settings.of(module_of(name))
        if told.schemes and weight.scheme.name not in told.schemes:
            problems.append(_disagreement(name, told.how, weight.scheme.name, weight.values, tensors))
        bits = settings.bits_of(module_of(name)) if "qzeros" in weight.scheme.beside else None
        if bits and bits != weight.bits:
            problems.append(
                _disagreement(name, f"{bits} bits", f"{weight.bits} bits", weight.values, tensors)
            )
    for module in sorted(settings.named):
        name = f"{module}.weight"
        told = settings.of(module)
        if name in tensors and name not in found.weights and told.schemes and told is not NOT_QUANTIZED:
            problems.append(_disagreement(name, told.how, "not quantized", name, tensors))
    return problems


def module_of(name: str) -> str:
    """The module of a weight."""
    return name.rpartition(".")[0]


def _disagreement(name: str, told: str, stored: str, values: str, tensors: Mapping[str, Tensor]) -> Problem:
    return Problem(
        "quantization-config-differs",
        "a weight is not stored as its quantization_config says",
        tensor=name,
        file=tensors[values].file,
        rule="quantization_config says how the weight of each module is quantized, and its tensors must agree",
        expected=told,
        found=f"{stored}: {tensors[values].dtype} {list(tensors[values].shape)}",
        remedy="pass the config.json (and hf_quant_config.json) that was saved with these weights",
    )
