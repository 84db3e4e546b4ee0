"""Build the adapter_config.json of an adapter that PEFT did not save, from its tensors and settings."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from reshard.adapters.adapter import Adapter
from reshard.adapters.adapter_settings import unknown_alpha
from reshard.base.errors import ReshardError

_LAYER = re.compile(r"(.*\blayers\.)(\d+)\.(.+)")


def adapter_config(adapter: Adapter, base: str | None = None) -> dict[str, Any]:
    """The config that PEFT's `from_pretrained` needs to build the adapter; the source's own, if it has one.

    `base` is the folder of the base model, if it is known. Raises ReshardError if alpha is unknown.
    """
    settings = adapter.settings
    if settings.alpha("") is None:
        raise ReshardError(unknown_alpha())
    named = {"base_model_name_or_path": base or settings.base}
    if settings.written:
        return {**settings.config, **named}
    ranks = Counter(pair.rank for pair in adapter.pairs.values())
    rank = ranks.most_common(1)[0][0]
    other = {f"^{re.escape(m)}": pair.rank for m, pair in adapter.pairs.items() if pair.rank != rank}
    pairs = adapter.pairs.values()
    return {
        "peft_type": "LORA",
        "task_type": settings.config.get("task_type") or "CAUSAL_LM",
        **named,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": settings.config["lora_alpha"],
        "lora_dropout": settings.dropout,
        "target_modules": target_modules(adapter),
        "modules_to_save": sorted({_module_of(name) for name in adapter.whole}) or None,
        "rank_pattern": other,
        "alpha_pattern": settings.config.get("alpha_pattern") or {},
        "use_rslora": bool(settings.config.get("use_rslora")),
        "use_dora": any(pair.magnitude is not None for pair in pairs),
        "lora_bias": any(pair.bias is not None for pair in pairs),
        "bias": settings.config.get("bias", "none"),
        "fan_in_fan_out": bool(settings.config.get("fan_in_fan_out")),
        "init_lora_weights": True,
    }


def target_modules(adapter: Adapter) -> list[str]:
    """The last parts of module names if every layer has the same modules, otherwise full names."""
    layers: dict[str, set[str]] = {}
    outside = set()
    for module in adapter.pairs:
        if match := _LAYER.fullmatch(module):
            layers.setdefault(match[1] + match[2], set()).add(match[3])
        else:
            outside.add(module)
    alike = list(layers.values())
    if any(same != alike[0] for same in alike) or any(".experts." in module for module in adapter.pairs):
        return sorted(adapter.pairs)
    return sorted({name.rpartition(".")[2] for name in (alike[0] if alike else set()) | outside})


def _module_of(name: str) -> str:
    """`lm_head` for `lm_head.weight`, as in `modules_to_save`."""
    return name.rpartition(".")[0].rpartition(".")[2]
