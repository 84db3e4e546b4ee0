"""Options by their own names: the fields of a method's config, and ModelConfig's fields for LoRA.

Defaults avoid known failures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any

from packaging.version import Version

from reshard.base.errors import Problem, ReshardError
from reshard.base.plain_json import json_of
from reshard.checks.precision import BFLOAT16_CAPABILITY
from reshard.diagnosis.history.api_table import table
from reshard.diagnosis.history.call_parameters import refused
from reshard.diagnosis.history.versions_in_use import Versions
from reshard.training.dataclass_fields import Field, enumeration, fields_of, kind, literals, typed
from reshard.training.engine import EngineOption
from reshard.training.methods import is_rewarded
from reshard.training.option_checks import mistyped
from reshard.training.option_names import OPTION_ALIASES, nearest
from reshard.training.planning.gpu_models import capability, has_gpu
from reshard.training.run import Run
from reshard.training.trl import quantized, refused_options
from reshard.training.trl.trl_methods import TRL_METHODS

LORA_OPTIONS = (
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters"),
    *("lora_modules_to_save", "use_rslora", "use_dora"),
)
MODEL_CONFIG_OPTIONS = ("dtype", "attn_implementation", *quantized.QUANTIZATION_OPTIONS)
"""Supported fields of TRL's ModelConfig."""


ADDED_OPTIONS = {
    "loraplus_lr_ratio": Field(
        "loraplus_lr_ratio",
        float | None,
        "",
        "LoRA+: how many times the learning rate of lora_A that of lora_B is; 16 is usual.",
    )
}
"""Our own options, for features of a package that no config of TRL offers."""
BASE_CONFIGS = {
    "TrainingArguments": ("transformers", "training_args.py"),
    "_BaseConfig": ("trl", "trainer/base_config.py"),
    "SFTConfig": ("trl", "trainer/sft_config.py"),
}
"""The configs whose fields others inherit, and where they are declared."""
ENUMERATIONS = {
    **dict.fromkeys(("IntervalStrategy", "SaveStrategy", "HubStrategy", "SchedulerType"), "trainer_utils.py"),
    "OptimizerNames": "training_args.py",
}
"""Types of transformers with a fixed number of values, and where they are declared."""


@cache
def fields_for(method: str) -> dict[str, Field]:
    """Every field by name: the method's config, then supported fields of ModelConfig, then our own.

    They are read from the installed source, as importing it takes seconds. Raises ReshardError if it is missing.
    """
    way = TRL_METHODS[method]
    folders = {name: _folder(name) for name in ("trl", "transformers")}
    names = {name: enumeration(folders["transformers"] / file, name) for name, file in ENUMERATIONS.items()}
    names["default_optim"] = "adamw_torch" + "_fused" * (Version(version("torch")) >= Version("2.8"))
    bases = {name: folders[package] / file for name, (package, file) in BASE_CONFIGS.items()}
    own = fields_of(folders["trl"] / way.config_file, way.config, names, bases)
    model = fields_of(folders["trl"] / "trainer/model_config.py", "ModelConfig", names)
    return (
        {name: field for name, field in own.items() if name not in OPTION_ALIASES}
        | {name: field for name, field in model.items() if name in (*LORA_OPTIONS, *MODEL_CONFIG_OPTIONS)}
        | ADDED_OPTIONS
    )


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec and spec.origin, package  # it is required
    return Path(spec.origin).parent


def known(method: str) -> list[EngineOption]:
    """Every option of a method, with its type, its default and TRL's help text."""
    found = {
        name: field
        for name, field in fields_for(method).items()
        if name not in refused_options.REFUSED_OPTIONS
    }
    ours = FIXED_VALUES | (SFT_VALUES if method == "sft" else {})
    return [
        EngineOption(name, kind(field.hint), str(ours.get(name, field.value)), field.help)
        for name, field in sorted(found.items())
    ]


def options_of(run: Run) -> dict[str, Any]:
    """All options of a run, typed: the given ones, then our defaults, then TRL's.

    Raises ReshardError naming every option that is unknown, mistyped, or would break what reshard promises.
    """
    there = fields_for(run.method)
    problems = [*_unknown(run, there), *refused_options.refused(run)]
    given: dict[str, Any] = {}
    for name, value in run.options.items():
        if name in there and name not in refused_options.REFUSED_OPTIONS:
            try:
                given[name] = _typed(name, value, there[name].hint)
            except ValueError:
                words = _WORDS_FOR.get(kind(there[name].hint), kind(there[name].hint))
                problems.append(mistyped(name, value, words, literals(there[name].hint)))
    problems += refused_options.contradictions(run, given)
    if problems:
        raise ReshardError(problems)
    stated = {name: field.value for name, field in there.items()}
    told = stated | defaults_of(run, given) | given
    return _renamed(told | of_evaluation(run, told, given) | given)


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """Options that transformers has renamed, under both names: the new one takes precedence, the old one warns."""
    for suffix in ("", "_kwargs"):
        old, new = f"gradient_checkpointing{suffix}", f"activation_checkpointing{suffix}"
        if new in options:
            chosen = options[old] if options[new] is None else options[new]
            options |= {old: chosen, new: chosen}
    return options


def _unknown(run: Run, there: Mapping[str, Any]) -> Iterator[Problem]:
    names = [name for name in there if name not in refused_options.REFUSED_OPTIONS]
    for name in run.options:
        if name in there or name in refused_options.REFUSED_OPTIONS:
            continue
        other = _of_other_release(TRL_METHODS[run.method].config, name)
        cure = other or nearest(name, names, _ELSEWHERE) or "--options lists those that there are"
        yield Problem(
            "option-not-in-config",
            f"{TRL_METHODS[run.method].config} has no option {name}",
            found=f"--{name} {run.options[name]}",
            remedy=cure,
        )


def _of_other_release(config: str, name: str) -> str:
    """What to do about an option that other releases have; "" if none has it."""
    found = table("trl")
    why = refused(found, f"{config}.__init__", name, Versions()) if found else None
    if why is None or why.bounds is None:
        return ""
    if why.bounds.since:
        return f"it came with {why.table.package} {why.bounds.shown}: update it"
    return f"it is called {why.renamed} now" if why.renamed else "leave it out: it was removed"


_ELSEWHERE = {
    "lr": "learning_rate",
    "train_iters": "max_steps",
    "train_epochs": "num_train_epochs",
    "micro_batch_size": "per_device_train_batch_size",
    "batch_size": "per_device_train_batch_size",
    "global_batch_size": "gradient_accumulation_steps",
    "seq_length": "max_length",
    "clip_grad": "max_grad_norm",
    "lr_warmup_fraction": "warmup_steps",
    "lr_warmup_iters": "warmup_steps",
    "lr_decay_style": "lr_scheduler_type",
    "save_interval": "save_steps",
    "pack": "packing",
    "recompute_granularity": "gradient_checkpointing",
    "epochs": "num_train_epochs",
}
"""Names of the same options in Megatron-LM or in common use."""


_WORDS_FOR = {"bool": "true or false", "int": "an integer", "float": "a number"}


def _typed(name: str, value: Any, hint: Any) -> Any:
    """A value from the command line or from YAML, converted to the field's type. Raises ValueError."""
    if value is None or isinstance(value, dict) or (name == "report_to" and value == "none"):
        return value
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return json_of(value.encode())
    if isinstance(value, str) and "list[" in str(hint) and not _WORDS.fullmatch(value):
        value = [value]
    return typed(value, hint)


_WORDS = re.compile(r"none|\[.*|[\w.-]+(,[\w.-]+)+", re.IGNORECASE)
"""A list: words separated by commas, as opposed to a regular expression, or in brackets; or none."""


FIXED_VALUES: dict[str, Any] = {
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
SFT_VALUES: dict[str, Any] = {"assistant_only_loss": True}
"""More defaults, for SFT only."""
DEFAULT_EVAL_STEPS = 500
"""Steps between evaluations for `eval_strategy steps` without a number: transformers' default for logs."""


def defaults_of(run: Run, typed: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of a run, given the options that were set."""
    gpu = has_gpu() and not typed.get("use_cpu")
    half = _half(typed, gpu)
    return {
        **FIXED_VALUES,
        **(SFT_VALUES if run.method == "sft" else {}),
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
    often = {"eval_steps": DEFAULT_EVAL_STEPS} if strategy == "steps" and "logging_steps" not in typed else {}
    return {"eval_strategy": strategy, "per_device_eval_batch_size": at_a_time, **often}


def _half(typed: Mapping[str, Any], gpu: bool) -> str | None:
    """The 16-bit dtype of computations; None on a CPU, and if both were switched off."""
    for name, half in (("bf16", "bfloat16"), ("fp16", "float16")):
        if typed.get(name):
            return half
    if not gpu or typed.get("bf16") is False:
        return None
    least = capability()
    if least is not None and least < BFLOAT16_CAPABILITY:
        return None if typed.get("fp16") is False else "float16"
    return "bfloat16"


def _dtype(run: Run, half: str | None) -> str:
    """Weights are in float32, except bases of LoRA, which are not updated, and ZeRO, which keeps a float32 copy."""
    return half if half and (run.lora or run.parallel in ("zero2", "zero3")) else "float32"
