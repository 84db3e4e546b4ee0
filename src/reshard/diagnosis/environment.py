"""Diagnose the environment: rules that the versions break together, and stray settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from reshard.base.plain_yaml import yaml_of
from reshard.diagnosis.finding import Finding, Place
from reshard.diagnosis.machine import Environment, Gpu, look_around, unmet
from reshard.diagnosis.rules import told
from reshard.diagnosis.words import words

__all__ = ["Environment", "Gpu", "diagnose_environment", "look_around"]

Rule = Callable[[Environment], Iterator[Finding]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Register a rule of the environment."""
    RULES.append(function)
    return function


def diagnose_environment(environment: Environment | None = None) -> list[Finding]:
    """Findings about the environment, errors first."""
    place = environment or look_around()
    found = [finding for each in RULES for finding in each(place)]
    return sorted(found, key=lambda finding: finding.severity != "error")


def _found(
    identifier: str, shows: str, values: Mapping[str, object] | None = None, severity: str | None = None
) -> Finding:
    return told(identifier, [Place("environment", None, shows)], values, severity=severity)


@rule
def device_map_becomes_tensor_parallelism(env: Environment) -> Iterator[Finding]:
    """transformers 4.50.3 to 4.53.3 become tensor parallel if WORLD_SIZE is set."""
    if env.has("transformers", ">=4.50.3,<4.54"):
        is_set = env.world_size is not None
        shows = f"transformers {env.versions['transformers']}" + (f", WORLD_SIZE={env.world_size}" * is_set)
        yield _found("env-device-map-tp", shows, severity="error" if is_set else "warning")


@rule
def old_gpus(env: Environment) -> Iterator[Finding]:
    """bfloat16 and flash-attention 2 need compute capability 8."""
    if env.capability is not None and env.capability < 8:
        name = min(env.gpus, key=lambda gpu: gpu.capability).name
        flash = ", flash-attn " + env.versions["flash-attn"] if "flash-attn" in env.versions else ""
        shows = f"{name}, compute_cap {env.capability}{flash}"
        yield _found("env-no-bf16", shows, {"name": name, "capability": env.capability})


@rule
def accelerate_before_1_15(env: Environment) -> Iterator[Finding]:
    """FSDP2 with LoRA lost shards, and clipping failed on mixed gradients."""
    if env.has("accelerate", "<1.15") and "peft" in env.versions:
        shows = f"accelerate {env.versions['accelerate']}, peft {env.versions['peft']}"
        yield _found("env-accelerate-fsdp2-lora", shows)


UNDECLARED = (("trl", "<0.20", "transformers", ">=5"),)
"""Incompatible versions that no metadata declares: TRL before 0.20 does not support transformers 5."""


@rule
def requirements(env: Environment) -> Iterator[Finding]:
    """Requirements in installed packages' metadata that are not met; and TRL's imports of transformers."""
    for package, needs in unmet(env):
        installed = env.versions[needs.name]
        phrase = {
            "package": package,
            "version": env.versions[package],
            "needs": needs,
            "installed": installed,
        }
        shows = f"{package} {env.versions[package]}: {needs}; {needs.name} {installed}"
        kind = (
            "env-trl-transformers" if {package, needs.name} == {"trl", "transformers"} else "env-requirement"
        )
        yield _found(kind, shows, {"shows": words("requires", **phrase), "package": package, "needs": needs})
    for package, ours, other, theirs in UNDECLARED:
        if env.has(package, ours) and env.has(other, theirs):
            shows = f"{package} {env.versions[package]}, {other} {env.versions[other]}"
            yield _found("env-trl-transformers", shows, {"shows": shows})


@rule
def stale_world_size(env: Environment) -> Iterator[Finding]:
    """WORLD_SIZE without a rank does not come from a launcher."""
    launched = env.variables.keys() & {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}
    if env.world_size is not None and not launched:
        yield _found("env-stale-world-size", f"WORLD_SIZE={env.world_size}, RANK=–")


@rule
def more_processes_than_gpus(env: Environment) -> Iterator[Finding]:
    """LOCAL_WORLD_SIZE compared with the number of visible GPUs."""
    local = env.variables.get("LOCAL_WORLD_SIZE", "")
    visible = env.variables.get("CUDA_VISIBLE_DEVICES")
    count = len(env.gpus) if visible is None else len([each for each in visible.split(",") if each.strip()])
    if env.gpus and local.isdecimal() and int(local) > count:
        shows = f"LOCAL_WORLD_SIZE={local}, GPU × {count}"
        yield _found("env-more-processes-than-gpus", shows, {"local": local, "count": count})


@rule
def stray_accelerate_config(env: Environment) -> Iterator[Finding]:
    """`accelerate launch` without --config_file silently uses the default config."""
    cache = env.variables.get("HF_HOME") or str(env.home / ".cache/huggingface")
    path = Path(cache) / "accelerate/default_config.yaml"
    if not path.is_file():
        return
    try:
        chosen = _choices(yaml_of(path.read_bytes()))
    except (ValueError, OSError) as error:
        wrong = " ".join(str(error).split())
        yield _found("env-accelerate-config-unreadable", wrong, {"path": path, "wrong": wrong})
    else:
        yield _found("env-accelerate-default-config", f"{path}: {chosen}", {"path": path, "chosen": chosen})


def _choices(content: Any) -> str:
    """What a config of accelerate enables."""
    if not isinstance(content, dict):
        raise ValueError(f"found {type(content).__name__}, expected keys with values")
    keys = ("distributed_type", "num_processes", "num_machines", "mixed_precision", "use_cpu")
    return ", ".join(f"{key}: {content[key]}" for key in keys if key in content) or "{}"


DRIVERS = {11: 450, 12: 525, 13: 580}
"""The minimum driver by major version of CUDA (NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1)."""
CAPABILITIES = {8.0: (11, 0), 8.6: (11, 1), 8.9: (11, 8), 9.0: (11, 8), 10.0: (12, 8), 12.0: (12, 8)}
"""The first CUDA that compiles for a compute capability (NVIDIA, CUDA release notes)."""
DROPPED = {13: 7.5}
"""The lowest compute capability that a major version of CUDA compiles for (CUDA 13.0 release notes)."""


@rule
def cuda_against_driver_and_gpus(env: Environment) -> Iterator[Finding]:
    """torch's CUDA version compared with the driver and the GPUs."""
    if not env.cuda or not (match := re.match(r"(\d+)\.(\d+)", env.cuda)):
        return
    built = (int(match[1]), int(match[2]))
    least = DRIVERS.get(built[0])
    driver = re.match(r"\d+", env.driver or "")
    if least and driver and int(driver[0]) < least:
        shows = f"driver {env.driver}, CUDA {env.cuda}"
        older = max((major for major, needed in DRIVERS.items() if needed <= int(driver[0])), default=11)
        yield _found(
            "env-old-driver", shows, {"least": least, "cuda": env.cuda, "driver": env.driver, "older": older}
        )
    for gpu in sorted(set(env.gpus), key=lambda each: each.capability):
        first = next(
            (cuda for each, cuda in sorted(CAPABILITIES.items(), reverse=True) if each <= gpu.capability),
            (0, 0),
        )
        if built < first or gpu.capability < DROPPED.get(built[0], 0):
            values = {"name": gpu.name, "capability": gpu.capability, "cuda": env.cuda}
            values["fit"] = "cu128" if built < first else "cu126"
            yield _found("env-capability-not-built", f"{gpu.name}, CUDA {env.cuda}", values)


@rule
def torch_without_cuda(env: Environment) -> Iterator[Finding]:
    """A CPU build of torch although there are GPUs."""
    if env.gpus and (env.cuda == "" or env.versions.get("torch", "").endswith("+cpu")):
        yield _found("env-torch-without-cuda", f"torch {env.versions.get('torch')}, GPU × {len(env.gpus)}")


LEAST_SHM = 256 << 20


@rule
def small_shared_memory(env: Environment) -> Iterator[Finding]:
    """Docker provides 64 MiB of /dev/shm; NCCL and the workers of data loaders exchange tensors through it."""
    if env.shm is not None and env.shm < LEAST_SHM:
        yield _found("env-small-shm", f"/dev/shm: {env.shm >> 20} MiB", {"size": env.shm >> 20})


@rule
def flash_attention_of_another_torch(env: Environment) -> Iterator[Finding]:
    """The version of a flash-attn wheel names the torch for which it was compiled."""
    built = re.search(r"torch(\d+\.\d+)", env.versions.get("flash-attn", ""))
    torch = env.versions.get("torch", "")
    if built and torch and not torch.startswith(f"{built[1]}."):
        shows = f"flash-attn {env.versions['flash-attn']}, torch {torch}"
        yield _found("env-flash-attn-torch", shows, {"built": built[1], "torch": torch})
