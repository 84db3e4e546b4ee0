"""Checks before the start for reasons why TRL cannot run: plan, machine, variables, and what its packages refuse.

`refused_options.py` has those of options. Names and optimizers are looked up, or made, by the frameworks themselves.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from reshard.base.argument_checks import truth
from reshard.base.errors import Problem, ReshardError, when
from reshard.base.languages import Text
from reshard.checks.environment import Environment
from reshard.checks.machine_checks import old_gpus, violations_of
from reshard.folders.companions import CONFIG
from reshard.training import rewards
from reshard.training.findings_as_problems import in_short, of_violation, version_of
from reshard.training.option_checks import mistyped, without_package
from reshard.training.run import Run, config_of
from reshard.training.trl import vllm_checks
from reshard.training.trl.batches import alien_parallelism, plan_instead
from reshard.training.trl.config_fields import options_of
from reshard.training.trl.trl_methods import TRL_METHODS

ENVIRONMENT_CODES = ("env-device-map-tp", "env-accelerate-fsdp2-lora", "env-trl-transformers")
"""Rules of the environment that can break a run. Rules about launches cannot: reshard sets these variables itself."""


def asked(run: Run) -> Iterator[Problem]:
    """Problems of layouts, plans and models that TRL does not support, whatever is installed."""
    way = TRL_METHODS[run.method]
    yield from when(
        run.parallel not in way.plans,
        "trl-method-plan-unsupported",
        f"{way.name} does not run under this plan",
        rule=way.why,
        expected=f"--parallel {', '.join(way.plans)}",
        found=f"--parallel {run.parallel}",
        remedy=f"{plan_instead(run, way.plans[0])}; LoRA and gradient checkpointing save memory",
    )
    alien = list(alien_parallelism(run))
    yield from alien
    yield from when(
        not alien and (run.layout.tp > 1) != (run.parallel == "tp"),
        "parallel-and-tp-disagree",
        "--parallel and --tp disagree",
        found=f"--parallel {run.parallel} with --tp {run.layout.tp}",
        expected="--parallel tp --tp N",
        remedy="pass both, or neither",
    )
    with suppress(ReshardError, OSError):  # reported for the model's folder
        if config_of(run.model).get("model_type") == "qwen":
            yield _first_qwen(run)


_OF_QWEN_1 = (
    "'transformers==4.53.3' 'trl==0.19.1' 'peft==0.15.2' 'accelerate==1.9.0' 'datasets==3.6.0' tiktoken einops "
    "transformers_stream_generator"
)
"""Packages with which Qwen-1 was trained: LoRA of the class in Qwen/Qwen-7B, on two ranks of torch 2.6 and 2.13."""


def _first_qwen(run: Run) -> Problem:
    """The problem of Qwen-1: its code imports a package that needs `DisjunctiveConstraint` of transformers 4."""
    return Problem(
        "model-needs-transformers-4",
        "the code of Qwen-1 does not run with transformers 5",
        file=str(run.model / CONFIG),
        rule="transformers has no class for it, and its own code needs what transformers 5 has removed",
        found="model_type: qwen",
        expected="Qwen1.5 or later (model_type qwen2, qwen3)",
        remedy="train it by your own script, with ddp_find_unused_parameters=False, in another environment: python -m "
        f"venv old && old/bin/pip install torch {_OF_QWEN_1} && reshard guard -- old/bin/torchrun "
        f"--nproc-per-node {run.ranks.nproc or 'gpu'} script.py",
    )


def machine(run: Run, options: Mapping[str, Any], environment: Environment) -> Iterator[Problem]:
    """Problems of the environment that affect this run."""
    yield from (
        of_violation(violation)
        for violation in violations_of(environment)
        if violation.code in ENVIRONMENT_CODES
    )
    yield from variables(run, options, environment.variables)
    half = options.get("bf16") or str(options.get("attn_implementation")).startswith("flash")
    if half and environment.gpus and not options.get("use_cpu"):
        yield from (of_violation(violation, "error") for violation in old_gpus(environment))


def model(run: Run) -> Iterator[Problem]:
    """Problems of the model's own code that would fail at the first step. Untrusted code is not run."""
    from reshard.diagnosis.targets.trainability import remote_code  # with all formats of checkpoints

    options = options_of(run)
    if options["trust_remote_code"] and options["gradient_checkpointing"]:
        for finding in remote_code(run.model):
            if finding.code == "checkpoint-old-gradient-checkpointing":
                problem = in_short(finding, "error")
                cure = f"{problem.remedy} Or pass --gradient_checkpointing false."
                yield replace(problem, remedy=Text.same(cure))


def variables(
    run: Run, options: Mapping[str, Any], given: Mapping[str, str] = os.environ
) -> Iterator[Problem]:
    """Variables of accelerate that contradict the plan: `accelerate launch` and shells set them, and they win."""
    for name, (fitting, asked) in _planned(run, options).items():
        value = given.get(name, "").lower()
        if value and value not in fitting and (not name.startswith("ACCELERATE_USE") or truth(value)):
            yield Problem(
                "environment-contradicts-plan",
                "an environment variable contradicts the plan",
                rule="accelerate's variables override arguments",
                expected=asked,
                found=f"{name}={given[name]}",
                remedy="unset it, or let `accelerate launch` take a config that says the same as the flags of reshard",
            )


_SWITCHES = {
    "ACCELERATE_USE_FSDP": "fsdp2",
    "ACCELERATE_USE_DEEPSPEED": "zero",
    "ACCELERATE_USE_MEGATRON_LM": "megatron",
}
"""Variables that switch a plan on, and how its name begins."""
_SIZES = {"TP_SIZE": "tp", "CP_SIZE": "cp", "SP_SIZE": "sp", "DP_SHARD_SIZE": "dp_shard"}


def _planned(run: Run, options: Mapping[str, Any]) -> dict[str, tuple[Sequence[str], str]]:
    """The values of accelerate's variables that fit the plan, and the plan in words."""
    kind, plan = run.parallel, f"--parallel {run.parallel}"
    precision = next((name for name in ("bf16", "fp16") if options[name]), "no")
    values: dict[str, tuple[Sequence[str], str]] = {
        name: ((), plan) for name, begins in _SWITCHES.items() if not kind.startswith(begins)
    }
    if not options["use_cpu"]:
        values["ACCELERATE_USE_CPU"] = (), "the GPU; --use_cpu to train without one"
    values["ACCELERATE_MIXED_PRECISION"] = ("no", precision), f"mixed precision: {precision}"
    if kind == "fsdp2":
        values["FSDP_VERSION"] = ("2",), plan
    if kind.startswith("zero"):
        values["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = (kind[-1],), plan
    for suffix, name in _SIZES.items():
        size = str(getattr(run.layout, name, 1))
        values[f"PARALLELISM_CONFIG_{suffix}"] = ("1", size), f"{name} {size}"
    return values


def loaded(run: Run, options: Mapping[str, Any], environment: Environment) -> Iterator[Problem]:
    """Problems that the installed packages know: names and values of options, rewards, vLLM."""
    yield from refused_by_packages(run, options)
    yield from vllm_checks.problems(run, options, environment)


def refused_by_packages(run: Run, options: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of a run's options that only its packages know; they are imported for it."""
    typed = {name: options[name] for name in run.options if name in options}
    yield from _unknown_names(typed)
    if run.reward:
        yield from rewards.problems(run.reward, typed.get("reward_weights"))
    for name, (asked, install) in _PACKAGES.items():
        if typed.get(name) and not _is_there(asked):
            yield without_package(f"--{name}", install)
    yield from _kernels(str(typed.get("attn_implementation")))
    yield from _optimizer(typed, options)
    yield from _schedule(typed, options)


_ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


def _unknown_names(typed: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of names that transformers does not know. An attention with a slash is a kernel of the Hub."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.training_args import trainer_log_levels

    attentions = [name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in name]
    known = {
        "attn_implementation": list(dict.fromkeys([*_ATTENTIONS, *attentions])),
        "report_to": [*INTEGRATION_TO_CALLBACK, "all", "none"],
        "log_level": [*trainer_log_levels],
        "log_level_replica": [*trainer_log_levels],
    }
    for option in known.keys() & typed.keys():
        given = typed[option] if isinstance(typed[option], list) else [typed[option]]
        for name in given:
            if name not in (None, *known[option]) and not (option == "attn_implementation" and "/" in name):
                yield mistyped(option, name, "", known[option])


_PACKAGES = {
    "use_vllm": ("trl.import_utils:is_vllm_available", "pip install 'trl[vllm]'"),
    "use_liger_kernel": ("transformers.utils:is_liger_kernel_available", "pip install liger-kernel"),
}
"""On/off options, the framework's function that checks for the package, and the command that installs it."""
_FLASH = {
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}
"""Kinds of flash attention, and their packages. If `kernels` is installed, transformers takes them from the Hub."""


def _kernels(attention: str) -> Iterator[Problem]:
    """Attention from the Hub, whose names have a slash, and flash attention, which also the Hub may provide."""
    package = "kernels" if "/" in attention else _FLASH.get(attention)
    if package and version_of(package) is None and not _is_there("transformers.utils:is_kernels_available"):
        gpu = "" if package == "kernels" else ", which needs a GPU"
        yield without_package(f"--attn_implementation {attention}", f"pip install {package}{gpu}")


def _is_there(asked: str) -> bool:
    module, _, name = asked.partition(":")
    return bool(getattr(import_module(module), name)())


_OF_TORCH = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
"""Optimizers that come with torch or transformers. Others may need a GPU or the model."""
_INSTALL = re.compile(r"`(pip install [^`]*?)[.`]+(?:$|\s)")
"""The install command in an error of transformers."""


def _optimizer(typed: Mapping[str, Any], told: Mapping[str, Any]) -> Iterator[Problem]:
    """Let transformers make the optimizer of a weight: it reports a missing package before it uses the model."""
    names = ("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon")
    if not (given := {name: typed[name] for name in names if name in typed}):
        return
    from transformers import Trainer
    from transformers.training_args import OptimizerNames

    chosen = OptimizerNames(told["optim"])
    try:
        kind, arguments = Trainer.get_optimizer_cls_and_kwargs(
            SimpleNamespace(**{**told, "optim": chosen}), None
        )
        if chosen.value in _OF_TORCH:
            kind(_weights(), **arguments)
    except Exception as error:
        why = str(error).split("\n")[0]
        if isinstance(error, ImportError) or (isinstance(error, ValueError) and "install" in why):
            command = _INSTALL.search(why)
            install = command[1] if command else "install what transformers asks for"
            yield without_package(f"--optim {chosen.value}", install, why)
        elif chosen.value in _OF_TORCH:
            yield _refused("optimizer", given, why)
        # Otherwise the package is there, and transformers has gone on to the model.


def _schedule(typed: Mapping[str, Any], told: Mapping[str, Any]) -> Iterator[Problem]:
    """Let transformers make the schedule for a weight."""
    names = ("lr_scheduler_type", "lr_scheduler_kwargs")
    if not (given := {name: typed[name] for name in names if name in typed}):
        return
    from torch.optim import SGD
    from transformers import get_scheduler

    steps = int(told["max_steps"])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            get_scheduler(
                told["lr_scheduler_type"],
                SGD(_weights(), lr=float(told["learning_rate"])),
                num_warmup_steps=1,
                num_training_steps=steps if steps > 0 else _STEPS,
                scheduler_specific_kwargs=told["lr_scheduler_kwargs"],
            )
    except (ValueError, TypeError, KeyError) as error:
        yield _refused("schedule of the learning rate", given, str(error).split("\n")[0])


_STEPS = 1_000_000
"""Steps of a schedule, whose length is not known yet."""


def _refused(what: str, given: Mapping[str, Any], why: str) -> Problem:
    return Problem(
        "optimizer-options-refused",
        f"the {what} cannot be made with these options",
        rule=why,
        found=" ".join(f"--{name} {value}" for name, value in given.items()),
        remedy="correct these options",
    )


def _weights() -> list[Any]:
    from torch import zeros
    from torch.nn import Parameter

    return [Parameter(zeros(1))]
