"""What is wrong with a config, by reading it: of accelerate, DeepSpeed, TRL and LLaMA-Factory, as YAML or JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from reshard.runs.checks import rules
from reshard.runs.checks.command.launchers import truth
from reshard.runs.checks.config_text import ConfigText, read_config
from reshard.runs.checks.device_maps import spread_in
from reshard.runs.checks.environment import find_gpus
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.history.config_keys import ConfigKeys
from reshard.runs.checks.history.versions_in_use import Versions, read_from
from reshard.runs.checks.location import Launch
from reshard.runs.checks.other_releases import of_other_release
from reshard.runs.checks.precision import without_bf16
from reshard.runs.checks.script_device_maps import spread_model

TRL_KEYS = {
    "learning_rate",
    "per_device_train_batch_size",
    "num_train_epochs",
    "output_dir",
    "model_name_or_path",
}
"""Keys that identify the config of a run."""
FOREIGN_KEYS = {"base_model", "model", "rlhf_type", "train_type", "tuner_type", "teacher_model", "adapter"}
"""Keys of Axolotl and ms-swift, which have their own arguments."""
SWIFT_KEYS = {"rlhf_type", "train_type", "tuner_type", "teacher_model"}
LLAMAFACTORY_STAGES = ("pt", "sft", "rm", "ppo", "dpo", "kto")
"""Of LLaMA-Factory."""
ACCELERATE_KEYS = {"distributed_type", "compute_environment", "fsdp_config", "deepspeed_config"}


def check_config(
    path: str,
    installed: Mapping[str, str] | None = None,
    launch: Launch | None = None,
    *,
    refuses_unknown: bool = True,
) -> list[Finding]:
    """What is wrong with a config of a run that is started so. Raises ReshardError if it cannot be read.

    `installed` are the packages of the Python that reads it; None if that is this one. A script that does not refuse
    keys that it does not know runs without what they say.
    """
    config = replace(read_config(path), installed=installed)
    program = _program(config.content)
    checks = (_repeated_keys, *CONFIG_CHECKS.get(program, ()))
    findings = [each for check in checks for each in check(config)]
    if program == "trl" or (launch and not launch.is_alone):
        findings += _spread_models(config, launch)
    keys = list(_keys(config, program)) if program else []
    if program == "trl" and not refuses_unknown:
        keys = [replace(each, severity="warning") for each in keys]
    return [*findings, *keys]


def _program(given: Mapping[str, Any]) -> str:
    """The program that reads a config, "" if its keys do not show it."""
    names = given.keys()
    if isinstance(given.get("zero_optimization"), Mapping):
        return "deepspeed"
    if "base_model" in names:
        return ""  # axolotl's: it may have an `fsdp_config` with keys of its own
    if (
        "finetuning_type" in names
        or given.get("stage") in LLAMAFACTORY_STAGES
        or {"export_dir", "template"} <= names
    ):
        return "llamafactory"
    if names & TRL_KEYS and not names & FOREIGN_KEYS:
        return "trl"
    if names & ACCELERATE_KEYS:
        return "accelerate"
    return "ms-swift" if names & SWIFT_KEYS else ""


def _repeated_keys(config: ConfigText) -> Iterator[Finding]:
    """Keys that stand twice, of which readers of YAML and JSON keep another one."""
    if config.repeated:
        places = [config.place(key) for key in config.repeated]
        yield rules.finding("config-repeated-key", places, {"keys": ", ".join(config.repeated)})


# ------------------------------------------------------------------------------------------------- accelerate

FSDP1_KEYS = tuple(
    f"fsdp_{name}"
    for name in ("backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states")
)
"""FSDP2 has none of these (accelerate 1.15, FullyShardedDataParallelPlugin); it refuses forward prefetching."""


def _accelerate(config: ConfigText) -> Iterator[Finding]:
    if config.get("fsdp_config.fsdp_state_dict_type") == "SHARDED_STATE_DICT":
        where = config.place("fsdp_config.fsdp_state_dict_type")
        yield rules.finding("sharded-save-model", [where], severity="warning", certainty="possible")
    if config.get("mixed_precision") == "bf16":
        yield from without_bf16(find_gpus()[0], config.place("mixed_precision"))


def _fsdp(config: ConfigText) -> Iterator[Finding]:
    """Options of the version of FSDP that is not used."""
    given, after_forward = config.get("fsdp_config"), "fsdp_reshard_after_forward"
    if not isinstance(given, Mapping):
        return
    if given.get("fsdp_version") == 2:
        old = [key for key in FSDP1_KEYS if given.get(key) not in (None, False, "NO_PREFETCH")]
        places = [config.place(f"fsdp_config.{key}") for key in old]
        severity = "error" if truth(given.get("fsdp_forward_prefetch")) else "warning"
    else:
        old = [f"{after_forward}: true/false"] if isinstance(given.get(after_forward), bool) else []
        places = [config.place(f"fsdp_config.{after_forward}")]
        severity = "error"
    if old:
        yield rules.finding("config-fsdp-versions", places, {"keys": ", ".join(old)}, severity=severity)


# ------------------------------------------------------------------------------------------------- DeepSpeed


def _gathering(config: ConfigText) -> Iterator[Finding]:
    """ZeRO-3 that does not gather the weights when it saves."""
    stage, gather = "zero_optimization.stage", "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    if config.get(stage) == 3 and config.get(gather) in (None, False):
        place = config.place(gather if gather in config.key_lines else stage)
        is_of_trainer = any(re.search(r"\bauto\b", line) for line in config.lines)
        yield rules.finding(
            "config-zero3-gather", [place], certainty="likely" if is_of_trainer else "possible"
        )


# ------------------------------------------------------------------------------------- LLaMA-Factory and TRL


def _spread_models(config: ConfigText, launch: Launch | None) -> Iterator[Finding]:
    """Device maps over several devices, in `model_init_kwargs` and everywhere else."""
    keys = [] if launch and launch.is_alone else list(spread_in(config.content))
    if keys:
        yield spread_model([config.place(key) for key in keys], launch)


CONFIG_CHECKS: dict[str, tuple[Callable[[ConfigText], Iterator[Finding]], ...]] = {
    "accelerate": (_accelerate, _fsdp),
    "deepspeed": (_gathering,),
}
"""By the program that reads the config."""


# -------------------------------------------------------------------------------------------------------- keys


def _keys(config: ConfigText, program: str) -> Iterator[Finding]:
    """Keys that the program does not read: of another release, or misspelled."""
    versions = Versions(config.installed)
    keys = ConfigKeys(program, versions)
    if keys.table is None:
        return
    slips: dict[str, str] = {}
    for key in _keys_to_look_up(config, program):
        name = key.rpartition(".")[2]
        if why := keys.gone(name):
            yield of_other_release(keys.program, name, why, config.place(key), versions)
        elif near := keys.near(name):
            slips[key] = near
    if slips:
        names = ", ".join(key.rpartition(".")[2] for key in slips)
        values = {"program": keys.program, "key": names, "near": ", ".join(slips.values())}
        places, evidence = [config.place(key) for key in slips], [read_from(keys.table)]
        yield rules.finding("config-unknown-key", places, values, certainty="likely", evidence=evidence)


def _keys_to_look_up(config: ConfigText, program: str) -> list[str]:
    """The keys of a config to look up: those that the program reads itself."""
    if program == "deepspeed":
        free = ("optimizer.params.", "scheduler.params.")
        return [key for key in config.key_lines if not key.startswith(free)]
    nested = ("fsdp_config.", "deepspeed_config.") if program == "accelerate" else ()
    return [key for key in config.key_lines if "." not in key or key.startswith(nested)]
