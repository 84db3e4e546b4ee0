"""Diagnose the environment: what is installed, which rules the versions break together, and stray settings."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import which

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from reshard.doctor.finding import Finding, Place
from reshard.doctor.rules import told

PACKAGES = (
    *(
        "torch",
        "transformers",
        "accelerate",
        "trl",
        "peft",
        "deepspeed",
        "megatron-core",
        "transformer-engine",
    ),
    *("flash-attn", "safetensors", "tokenizers", "numpy"),
)


@dataclass(frozen=True)
class Gpu:
    """One device as the driver tells of it. `capability` is 7.0 for a V100, 8.0 for an A100."""

    name: str
    capability: float
    memory: int


@dataclass
class Environment:
    """What there is: versions by package, GPUs, the driver, and the environment variables."""

    versions: dict[str, str]
    gpus: list[Gpu]
    driver: str | None
    variables: Mapping[str, str]
    home: Path = field(default_factory=Path.home)

    def has(self, package: str, specifier: str) -> bool:
        """Whether a package is installed in one of these versions."""
        try:
            return package in self.versions and SpecifierSet(specifier).contains(
                Version(self.versions[package]), prereleases=True
            )
        except InvalidVersion:
            return False

    @cached_property
    def world_size(self) -> int | None:
        """WORLD_SIZE, if it is a number."""
        value = self.variables.get("WORLD_SIZE", "")
        return int(value) if value.isdecimal() else None

    @property
    def capability(self) -> float | None:
        """The least compute capability of all GPUs."""
        return min((gpu.capability for gpu in self.gpus), default=None)


def look_around() -> Environment:
    """The environment of this process. Nothing of what is looked at is imported."""
    gpus, driver = _gpus()
    return Environment(dict(_versions()), gpus, driver, dict(os.environ))


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            yield package, version(package)


def _gpus() -> tuple[list[Gpu], str | None]:
    """What nvidia-smi tells; it is asked because importing torch takes seconds."""
    if which("nvidia-smi") is None:
        return [], None
    fields = "name,compute_cap,memory.total,driver_version"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return [], None
    rows = [[part.strip() for part in row.split(",")] for row in told.splitlines() if row.count(",") == 3]
    gpus = [
        Gpu(row[0], float(row[1]), int(row[2]) << 20) for row in rows if re.fullmatch(r"\d+\.\d+", row[1])
    ]
    return gpus, rows[0][3] if rows else None


Rule = Callable[[Environment], Iterator[Finding]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Register a rule of the environment."""
    RULES.append(function)
    return function


def diagnose_environment(environment: Environment | None = None) -> list[Finding]:
    """What the environment breaks."""
    place = environment or look_around()
    return [finding for each in RULES for finding in each(place)]


def _found(
    identifier: str, shows: str, values: Mapping[str, object] | None = None, severity: str | None = None
) -> Finding:
    return told(identifier, [Place("environment", None, shows)], values, severity=severity)


@rule
def device_map_becomes_tensor_parallelism(env: Environment) -> Iterator[Finding]:
    """transformers 4.50.3 to 4.53.3, which WORLD_SIZE turns."""
    if env.has("transformers", ">=4.50.3,<4.54"):
        is_set = env.world_size is not None
        shows = f"transformers {env.versions['transformers']}" + (f", WORLD_SIZE={env.world_size}" * is_set)
        yield _found("env-device-map-tp", shows, severity="error" if is_set else "warning")


@rule
def old_gpus(env: Environment) -> Iterator[Finding]:
    """bfloat16 and flash-attention 2 need compute capability 8."""
    if env.capability is not None and env.capability < 8:
        name = min(env.gpus, key=lambda gpu: gpu.capability).name
        shows = f"{name}, compute capability {env.capability}"
        yield _found("env-no-bf16", shows, {"name": name, "capability": env.capability})


@rule
def accelerate_before_1_15(env: Environment) -> Iterator[Finding]:
    """FSDP2 with LoRA lost shards, and clipping failed on mixed gradients."""
    if env.has("accelerate", "<1.15") and "peft" in env.versions:
        shows = f"accelerate {env.versions['accelerate']}, peft {env.versions['peft']}"
        yield _found("env-accelerate-fsdp2-lora", shows)


UNFIT = (("trl", ">=1.0", "transformers", "<4.56"), ("trl", "<0.20", "transformers", ">=5"))
"""Versions that cannot be together: TRL 1 needs transformers 4.56, and TRL before 0.20 does not know transformers 5."""


@rule
def trl_and_transformers(env: Environment) -> Iterator[Finding]:
    """TRL imports names of transformers that come and go."""
    for package, ours, other, theirs in UNFIT:
        if env.has(package, ours) and env.has(other, theirs):
            shows = f"{package} {env.versions[package]}, {other} {env.versions[other]}"
            yield _found("env-trl-transformers", shows, {"shows": shows})


@rule
def stale_world_size(env: Environment) -> Iterator[Finding]:
    """WORLD_SIZE without a rank comes from no launcher."""
    launched = env.variables.keys() & {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"}
    if env.world_size is not None and not launched:
        yield _found("env-stale-world-size", f"WORLD_SIZE={env.world_size}, no RANK")


@rule
def more_processes_than_gpus(env: Environment) -> Iterator[Finding]:
    """LOCAL_WORLD_SIZE against the GPUs that are visible."""
    local = env.variables.get("LOCAL_WORLD_SIZE", "")
    visible = env.variables.get("CUDA_VISIBLE_DEVICES")
    count = len(env.gpus) if visible is None else len([each for each in visible.split(",") if each.strip()])
    if env.gpus and local.isdecimal() and int(local) > count:
        shows = f"LOCAL_WORLD_SIZE={local}, {count} GPUs visible"
        yield _found("env-more-processes-than-gpus", shows, {"local": local, "count": count})


@rule
def stray_accelerate_config(env: Environment) -> Iterator[Finding]:
    """`accelerate launch` without --config_file takes the default one, whatever it says."""
    cache = env.variables.get("HF_HOME") or str(env.home / ".cache/huggingface")
    path = Path(cache) / "accelerate/default_config.yaml"
    if path.is_file():
        yield _found("env-accelerate-default-config", str(path), {"path": path})
