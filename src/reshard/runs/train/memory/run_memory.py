"""The memory of a requested run: its options, with TRL's defaults, as a `TrainingSetup`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError
from reshard.folders.json_objects import read_object
from reshard.runs.checks.environment import look_around
from reshard.runs.train.memory.activations import LayerWidths
from reshard.runs.train.memory.estimate import TrainingSetup, memory_problem
from reshard.runs.train.memory.gpu_models import PlannedGpus, gpus_named
from reshard.runs.train.memory.parameter_counts import count_parameters
from reshard.runs.train.methods import TrainingMethod
from reshard.runs.train.options import TrainOptions
from reshard.runs.train.recipe import given_options
from reshard.transfer.source_files import Sources

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TRL_DEFAULTS = {
    "per_device_train_batch_size": "8",
    "max_length": "1024",
    "max_completion_length": "256",
    "gradient_checkpointing": "true",
    "bf16": "true",
    "dtype": "float32",
    "beta": "0",
    "lora_r": "16",
    "gradient_accumulation_steps": "1",
    "steps_per_generation": "",
    "attn_implementation": "",
    "load_in_4bit": "false",
    "fp16": "false",
    "trust_remote_code": "false",
    "use_vllm": "false",
}
"""Defaults of TRL 1.16 (`trl.trainer.*_config`, `model_config`) for what memory depends on."""


def check_memory(
    method: TrainingMethod, options: TrainOptions, nproc: int, rest: Sequence[str]
) -> list[Problem]:
    """The problem of a run that does not fit, if it is known on which GPUs it runs, and what the model is."""
    gpus = gpus_named(options.gpus) if options.gpus else _here()
    folder = Path(str(options.model)).expanduser()
    if gpus is None or not (folder / "config.json").is_file():
        return []
    try:
        setup = _setup(
            method, options, folder, nproc * options.nnodes, {**TRL_DEFAULTS, **given_options(rest)}
        )
    except ReshardError as error:
        return [each for each in error.problems if each.severity == "error"]
    problem = memory_problem(setup, gpus)
    return [problem] if problem else []


def _here() -> PlannedGpus | None:
    gpus = look_around().visible
    if not gpus:
        return None
    return PlannedGpus(gpus[0].name, len(gpus), min(gpu.memory for gpu in gpus))


def _setup(
    method: TrainingMethod, options: TrainOptions, folder: Path, gpus: int, given: Mapping[str, str]
) -> TrainingSetup:
    trusted = _is_true(given["trust_remote_code"])
    lora: dict[str, Any] = {
        "r": int(given["lora_r"]),
        "target_modules": given.get("lora_target_modules", "all-linear"),
    }
    batch = int(given["per_device_train_batch_size"])
    rounds = int(given["steps_per_generation"] or given["gradient_accumulation_steps"])
    compared = method.second_model or (method.generates and float(given["beta"]) != 0)
    half = _is_true(given["bf16"]) or _is_true(given["fp16"])
    length = given["max_completion_length"] if method.generates else given["max_length"]
    return TrainingSetup(
        counts=count_parameters(folder, lora if options.lora else None, trusted=trusted),
        widths=LayerWidths.of(read_object(folder / "config.json", Sources())),
        parallel=options.parallel,
        gpus=gpus,
        batch=batch,
        sequences=batch * method.sequences,
        length=int(length) if length.isdecimal() else int(TRL_DEFAULTS["max_length"]),
        weights=DTYPE_BYTES.get(given["dtype"], 4),
        computed=2 if half else DTYPE_BYTES.get(given["dtype"], 4),
        recomputed=_is_true(given["gradient_checkpointing"]),
        reference=compared and not options.lora,
        lora=options.lora,
        quantized=_is_true(given["load_in_4bit"]),
        generated=batch * rounds if method.generates and not _is_true(given["use_vllm"]) else 0,
        eager=given["attn_implementation"] == "eager",
    )


def _is_true(value: str) -> bool:
    return value.lower() in ("true", "1", "yes")
