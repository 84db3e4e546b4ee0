"""What is taken where nothing is said, so that a run falls into none of the known traps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.doctor.environment import look_around
from reshard.train.run import Run

ALWAYS: dict[str, Any] = {
    "logging_steps": 1,
    "report_to": "none",
    "gradient_checkpointing_kwargs": {
        "use_reentrant": False
    },  # reentrant + DDP + LoRA marks variables ready twice
    "logging_nan_inf_filter": False,  # else a loss that is NaN is logged as the average of those before
    "disable_tqdm": True,
    "attn_implementation": "sdpa",
    "lora_dropout": 0.0,
    "lora_target_modules": ["all-linear"],
}
BF16_CAPABILITY = 8.0
"""The compute capability from which a GPU computes in bfloat16: Ampere."""


def defaults_of(run: Run, typed: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of a run, given what was said already."""
    gpu = has_gpu() and not typed.get("use_cpu")
    half = _half(typed, gpu)
    return {
        **ALWAYS,
        "bf16": half == "bfloat16",
        "fp16": half == "float16",
        "use_cpu": not gpu,
        "dataloader_pin_memory": gpu,
        "dtype": _dtype(run, half),
    }


def has_gpu() -> bool:
    """Whether torch sees a GPU; asks the driver only, so that this process takes no memory there."""
    import torch

    return bool(torch.cuda.device_count())


def _half(typed: Mapping[str, Any], gpu: bool) -> str | None:
    """The 16-bit type that is computed in; None on a CPU, and where both were switched off."""
    for name, half in (("bf16", "bfloat16"), ("fp16", "float16")):
        if typed.get(name):
            return half
    if not gpu or typed.get("bf16") is False:
        return None
    capability = look_around().capability
    if capability is not None and capability < BF16_CAPABILITY:
        return None if typed.get("fp16") is False else "float16"
    return "bfloat16"


def _dtype(run: Run, half: str | None) -> str:
    """Weights lie in memory as float32, except where nobody updates them in it: bases of LoRA, and ZeRO, which
    keeps its own float32 copy."""
    return half if half and (run.lora or run.spread.kind in ("zero2", "zero3")) else "float32"
