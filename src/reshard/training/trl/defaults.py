"""Defaults that avoid known failures."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from reshard.checks.precision import BF16
from reshard.training.methods import is_rewarded
from reshard.training.planning.gpus import capability, has_gpu
from reshard.training.run import Run

ALWAYS: dict[str, Any] = {
    "logging_steps": 1,
    "report_to": "none",
    "gradient_checkpointing_kwargs": {
        "use_reentrant": False
    },  # reentrant + DDP + LoRA marks variables ready twice
    "logging_nan_inf_filter": False,  # else a NaN loss is logged as the average of those before
    "disable_tqdm": True,
    "attn_implementation": "sdpa",
    "lora_dropout": 0.0,
    "lora_target_modules": ["all-linear"],
}
OF_SFT: dict[str, Any] = {"assistant_only_loss": True}
"""More defaults, for SFT only."""
EVAL_STEPS = 500
"""Steps between evaluations for `eval_strategy steps` without a number: transformers' default for logs."""


def defaults_of(run: Run, typed: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of a run, given the options that were set."""
    gpu = has_gpu() and not typed.get("use_cpu")
    half = _half(typed, gpu)
    return {
        **ALWAYS,
        **(OF_SFT if run.method == "sft" else {}),
        "bf16": half == "bfloat16",
        "fp16": half == "float16",
        "use_cpu": not gpu,
        "dataloader_pin_memory": gpu,
        "dtype": _dtype(run, half),
    }


def of_evaluation(run: Run, told: Mapping[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    """When and in what batches a run is evaluated; `told` are all options so far, `typed` those that were set.

    TRL always evaluates eight samples at a time, whether or not they fit, and with `steps` alone as often as it logs,
    which here is every step.
    """
    if run.eval_data is None:
        return {}
    strategy = str(typed.get("eval_strategy") or ("steps" if typed.get("eval_steps") else "epoch"))
    at_a_time = int(told["per_device_train_batch_size"])
    if is_rewarded(run.method):
        group = int(told["num_generations_eval"] or told["num_generations"])
        at_a_time = ceil(at_a_time / group) * group  # a prompt's completions on one rank
    often = {"eval_steps": EVAL_STEPS} if strategy == "steps" and "logging_steps" not in typed else {}
    return {"eval_strategy": strategy, "per_device_eval_batch_size": at_a_time, **often}


def _half(typed: Mapping[str, Any], gpu: bool) -> str | None:
    """The 16-bit dtype of computations; None on a CPU, and if both were switched off."""
    for name, half in (("bf16", "bfloat16"), ("fp16", "float16")):
        if typed.get(name):
            return half
    if not gpu or typed.get("bf16") is False:
        return None
    least = capability()
    if least is not None and least < BF16:
        return None if typed.get("fp16") is False else "float16"
    return "bfloat16"


def _dtype(run: Run, half: str | None) -> str:
    """Weights are in float32, except bases of LoRA, which are not updated, and ZeRO, which keeps a float32 copy."""
    return half if half and (run.lora or run.parallel in ("zero2", "zero3")) else "float32"
