"""The fields of megatron-core's configs, which are options under their own names.

They are read from the installed source: importing it would take seconds, and torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from reshard.training.dataclass_fields import Field, fields_of

TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8"}
"""Megatron-LM's names of dtypes for optimizer states, and torch's."""
MODEL, OPTIMIZER, DATA_PARALLEL = "TransformerConfig", "OptimizerConfig", "DistributedDataParallelConfig"
CORE_CONFIGS: dict[str, tuple[tuple[str, str], ...]] = {
    MODEL: (
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
        ("transformer/transformer_config.py", "MLATransformerConfig"),
    ),
    OPTIMIZER: (("optimizer/optimizer_config.py", "OptimizerConfig"),),
    DATA_PARALLEL: (("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
}
"""The configs of a run, and where megatron-core 0.12 to 0.16 declare their fields, bases first."""

TRAINING_DEFAULTS = {
    "attention_dropout": "0.0",
    "hidden_dropout": "0.0",
    "moe_token_dispatcher_type": "alltoall",
    "initial_loss_scale": "65536 / tokens of a microbatch",
}
"""reshard's defaults that differ from megatron-core's."""


@lru_cache
def core_fields() -> dict[str, dict[str, Field]]:
    """Every field of each config by name; none if megatron-core is not installed."""
    spec = find_spec("megatron.core") if find_spec("megatron") else None
    if spec is None or spec.origin is None:
        return {config: {} for config in CORE_CONFIGS}
    root = Path(spec.origin).parent
    names = {"torch": SimpleNamespace(dtype=Literal["fp32", "bf16", "fp16", "fp8"])}
    return {
        config: {
            name: replace(field, default=TRAINING_DEFAULTS.get(name, field.default))
            for file, declared in places
            for name, field in fields_of(root / file, declared, names).items()
            if not name.startswith("_")
        }
        for config, places in CORE_CONFIGS.items()
    }


def all_fields() -> dict[str, Field]:
    """Every field by name. Fields that two configs share mean the same in both."""
    return {name: field for found in reversed(core_fields().values()) for name, field in found.items()}


def given_to(config: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are fields of a config, with values as it takes them."""
    import torch

    fields = core_fields()[config]
    return {
        name: getattr(torch, TORCH_DTYPES[value])
        if name.endswith("_dtype") and value in TORCH_DTYPES
        else value
        for name, value in values.items()
        if name in fields
    }
