"""QLoRA: adapters on a base that bitsandbytes keeps in 4 or 8 bits (TRL's `get_quantization_config`).

The base is quantized when it is loaded, and frozen. Only the adapter is saved and compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.base.argument_checks import truth

BITS_OF_OPTION = {"load_in_4bit": 4, "load_in_8bit": 8}
QUANTIZATION_OPTIONS = (*BITS_OF_OPTION, "bnb_4bit_quant_type", "use_bnb_nested_quant")
"""Fields of TRL's ModelConfig."""
NESTED, BLOCKS = 8.127 / 64, 32 / 64
"""Bits of scales per 4-bit weight: float32 per block of 64; nested, 8 bits per block and a float32 per 256 blocks."""


def bits(options: Mapping[str, Any]) -> int | None:
    """The bits of a base weight, from options as typed or parsed; None if the base is not quantized."""
    return next((found for name, found in BITS_OF_OPTION.items() if truth(options.get(name))), None)


def loading(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with which from_pretrained quantizes; none if it should not."""
    found = bits(options)
    if found is None:
        return {}
    import torch
    from transformers import BitsAndBytesConfig

    if found == 8:
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=getattr(torch, options["dtype"]),
        bnb_4bit_quant_type=options["bnb_4bit_quant_type"],
        bnb_4bit_use_double_quant=options["use_bnb_nested_quant"],
    )
    return {"quantization_config": config}


def saved(options: Mapping[str, Any], base: int) -> float:
    """Bytes that quantization saves per weight of `base` bytes."""
    found = bits(options)
    if found is None:
        return 0.0
    if found == 8:
        return base - 1.0
    scales = NESTED if options.get("use_bnb_nested_quant") else BLOCKS
    return base - (found + scales) / 8
