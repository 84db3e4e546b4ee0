"""Diagnose configs by reading them: accelerate, DeepSpeed, TRL and LLaMA-Factory, as YAML or JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from reshard.doctor.finding import Finding, Place
from reshard.doctor.grpo import KEYS, grpo_arithmetic
from reshard.doctor.keywords import REMOVED
from reshard.doctor.rules import told
from reshard.doctor.spread import SPREAD
from reshard.errors import ReshardError

RUN = {"learning_rate", "per_device_train_batch_size", "num_train_epochs", "finetuning_type", "output_dir"}
"""Keys by which a config of TRL or LLaMA-Factory is known."""


def diagnose_config(path: str) -> list[Finding]:
    """What will go wrong with a config. Raises ReshardError if it can be read neither as YAML nor as JSON."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = yaml.safe_load(text)  # JSON is YAML
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise ReshardError(
            "the config cannot be read",
            file=path,
            found=str(error).split("\n")[0],
            remedy="mend its syntax first",
        ) from None
    if not isinstance(content, Mapping):
        return []
    return [
        finding for rule in (_accelerate, _deepspeed, _run) for finding in rule(content, _finder(path, text))
    ]


def _finder(path: str, text: str) -> Callable[[str], Place]:
    lines = text.splitlines()

    def place(key: str, mended: str = "") -> Place:
        number = next((i for i, line in enumerate(lines, 1) if key in line), None)
        return Place(path, number, lines[number - 1].strip() if number else key, mended)

    return place


def _accelerate(config: Mapping[str, Any], place: Callable[..., Place]) -> Iterator[Finding]:
    if "distributed_type" not in config:
        return
    fsdp = config.get("fsdp_config") or {}
    if fsdp.get("fsdp_state_dict_type") == "SHARDED_STATE_DICT":
        where = place("fsdp_state_dict_type", "fsdp_state_dict_type: FULL_STATE_DICT")
        yield told("sharded-save-model", [where], severity="warning", certainty="possible")
    if config["distributed_type"] == "FSDP" and config.get("num_processes") == 1:
        yield told("config-one-process", [place("num_processes")], {"kind": "FSDP"})


def _deepspeed(config: Mapping[str, Any], place: Callable[..., Place]) -> Iterator[Finding]:
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return
    if zero.get("stage") == 3 and zero.get("stage3_gather_16bit_weights_on_model_save") in (None, False):
        mended = '"stage3_gather_16bit_weights_on_model_save": true,'
        yield told("config-zero3-gather", [place("stage", mended)])
    both = [key for key in ("fp16", "bf16") if (config.get(key) or {}).get("enabled") is True]
    if len(both) == 2:
        yield told("config-two-precisions", [place("fp16"), place("bf16")])


def _run(config: Mapping[str, Any], place: Callable[..., Place]) -> Iterator[Finding]:
    if not RUN & config.keys():
        return
    if config.get("device_map") in SPREAD:
        yield told("script-device-map", [place("device_map", "device_map: null")])
    removed = {**REMOVED["SFTConfig"], **REMOVED["GRPOConfig"]}
    ours = "finetuning_type" in config or "stage" in config  # LLaMA-Factory has keys of its own
    for key in () if ours else sorted(removed.keys() & config.keys()):
        values = {"name": "config", "old": key, "new": removed[key] or "–"}
        yield told(
            "script-removed-keyword",
            [place(key, f"{removed[key]}: {config[key]}" if removed[key] else "")],
            values,
        )
    if "num_generations" in config or "reward_funcs" in config:
        yield from grpo_arithmetic(
            {key: config.get(key) for key in KEYS},
            lambda key, better: place(key, f"{key}: {better}" if better else ""),
        )
    if config.get("bf16") and config.get("fp16"):
        yield told("config-two-precisions", [place("fp16"), place("bf16")])
