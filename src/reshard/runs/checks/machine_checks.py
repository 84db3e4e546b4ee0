"""What is wrong with a machine: versions that break together, GPUs that lack what a run uses, and stray settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from packaging.requirements import Requirement

from reshard.runs.checks import rules
from reshard.runs.checks.environment import Environment, look_around, unmet
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import Location
from reshard.runs.checks.precision import without_bf16

EnvironmentCheck = Callable[[Environment], Iterator[Finding]]
ENVIRONMENT_CHECKS: list[EnvironmentCheck] = []


def environment_check(function: EnvironmentCheck) -> EnvironmentCheck:
    """Register a check of the environment."""
    ENVIRONMENT_CHECKS.append(function)
    return function


def check_machine(environment: Environment | None = None) -> list[Finding]:
    """What is wrong with an environment, errors first; by default with that of this process."""
    here = environment or look_around()
    findings = [finding for each in ENVIRONMENT_CHECKS for finding in each(here)]
    return sorted(findings, key=lambda finding: finding.severity != "error")


def _finding(
    code: str, shows: str, values: Mapping[str, object] | None = None, severity: str | None = None
) -> Finding:
    """A finding about the environment, of which `shows` is the evidence."""
    return rules.finding(code, [Location("environment", None, shows)], values, severity=severity)


@environment_check
def device_map_becomes_tensor_parallelism(env: Environment) -> Iterator[Finding]:
    """transformers 4.50.3 to 4.53.3 become tensor parallel if WORLD_SIZE is set."""
    if env.has("transformers", ">=4.50.3,<4.54"):
        is_set = env.world_size is not None
        shows = f"transformers {env.versions['transformers']}" + (f", WORLD_SIZE={env.world_size}" * is_set)
        yield _finding("env-device-map-tp", shows, severity="error" if is_set else "warning")


@environment_check
def old_gpus(env: Environment) -> Iterator[Finding]:
    """GPUs of the machine without bfloat16."""
    yield from without_bf16(env.gpus)


@environment_check
def accelerate_before_1_15(env: Environment) -> Iterator[Finding]:
    """FSDP2 with LoRA lost shards, and clipping failed on mixed gradients."""
    if env.has("accelerate", "<1.15") and "peft" in env.versions:
        yield _finding(
            "env-accelerate-fsdp2-lora",
            f"accelerate {env.versions['accelerate']}, peft {env.versions['peft']}",
        )


UNDECLARED_CONFLICTS = (("trl", "<0.20", Requirement("transformers<5")),)
"""Requirements that no metadata declares: TRL before 0.20 does not support transformers 5."""


@environment_check
def requirements(env: Environment) -> Iterator[Finding]:
    """Requirements in installed packages' metadata that are not met; and TRL's imports of transformers."""
    undeclared = [
        (package, needs)
        for package, ours, needs in UNDECLARED_CONFLICTS
        if env.has(package, ours)
        and not env.has(needs.name, str(needs.specifier))
        and needs.name in env.versions
    ]
    for package, needs in (*unmet(env), *undeclared):
        version, installed = env.versions[package], env.versions[needs.name]
        is_of_trl = {package, needs.name} == {"trl", "transformers"}
        yield _finding(
            "env-trl-transformers" if is_of_trl else "env-requirement",
            f"{package} {version}: {needs}; {needs.name} {installed}",
            {"package": package, "version": version, "needs": needs, "installed": installed},
        )


@environment_check
def stale_world_size(env: Environment) -> Iterator[Finding]:
    """WORLD_SIZE without a rank does not come from a launcher."""
    launched = env.variables.keys() & {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}
    if env.world_size is not None and not launched:
        yield _finding("env-stale-world-size", f"WORLD_SIZE={env.world_size}, RANK=–")


def more_processes_than_gpus(processes: int, gpus: int, place: Location) -> Iterator[Finding]:
    """Processes of a node that share its visible GPUs. Without any, they run on the CPU."""
    if 0 < gpus < processes:
        yield rules.finding("env-more-processes-than-gpus", [place], {"local": processes, "count": gpus})


@environment_check
def launched_processes(env: Environment) -> Iterator[Finding]:
    """The processes that a launcher has started on this node."""
    local, gpus = env.variables.get("LOCAL_WORLD_SIZE", ""), len(env.visible)
    if local.isdecimal():
        place = Location("environment", None, f"LOCAL_WORLD_SIZE={local}, GPU × {gpus}")
        yield from more_processes_than_gpus(int(local), gpus, place)


LEAST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""The minimum driver by major version of CUDA (NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1)."""
CUDA_FOR_CAPABILITY = {8.0: (11, 0), 8.6: (11, 1), 8.9: (11, 8), 9.0: (11, 8), 10.0: (12, 8), 12.0: (12, 8)}
"""The first CUDA that compiles for a compute capability (NVIDIA, CUDA release notes)."""
DROPPED_BELOW = {13: 7.5}
"""The lowest compute capability that a major version of CUDA compiles for (CUDA 13.0 release notes)."""


@environment_check
def cuda_against_driver_and_gpus(env: Environment) -> Iterator[Finding]:
    """torch's CUDA version compared with the driver and the GPUs."""
    if not env.cuda or not (match := re.match(r"(\d+)\.(\d+)", env.cuda)):
        return
    built = (int(match[1]), int(match[2]))
    least = LEAST_DRIVERS.get(built[0])
    driver = re.match(r"\d+", env.driver or "")
    if least and driver and int(driver[0]) < least:
        shows = f"driver {env.driver}, CUDA {env.cuda}"
        older = max(
            (major for major, needed in LEAST_DRIVERS.items() if needed <= int(driver[0])), default=11
        )
        yield _finding(
            "env-old-driver", shows, {"least": least, "cuda": env.cuda, "driver": env.driver, "older": older}
        )
    for gpu in sorted(set(env.gpus), key=lambda each: each.capability):
        first = next(
            (
                cuda
                for each, cuda in sorted(CUDA_FOR_CAPABILITY.items(), reverse=True)
                if each <= gpu.capability
            ),
            (0, 0),
        )
        if built < first or gpu.capability < DROPPED_BELOW.get(built[0], 0):
            values = {"name": gpu.name, "capability": gpu.capability, "cuda": env.cuda}
            values["fit"] = "cu128" if built < first else "cu126"
            yield _finding("env-capability-not-built", f"{gpu.name}, CUDA {env.cuda}", values)


@environment_check
def torch_without_cuda(env: Environment) -> Iterator[Finding]:
    """A CPU build of torch although there are GPUs."""
    if env.gpus and (env.cuda == "" or env.versions.get("torch", "").endswith("+cpu")):
        yield _finding("env-torch-without-cuda", f"torch {env.versions.get('torch')}, GPU × {len(env.gpus)}")


LEAST_SHARED_MEMORY = 256 << 20


@environment_check
def small_shared_memory(env: Environment) -> Iterator[Finding]:
    """Docker provides 64 MiB of /dev/shm; NCCL and the workers of data loaders exchange tensors through it."""
    if env.shm is not None and env.shm < LEAST_SHARED_MEMORY:
        yield _finding("env-small-shm", f"/dev/shm: {env.shm >> 20} MiB", {"size": env.shm >> 20})
