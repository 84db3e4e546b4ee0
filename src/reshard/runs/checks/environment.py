"""Installed packages and properties of the machine, read without importing any package."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from shutil import disk_usage, which
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from reshard.base.errors import ReshardError
from reshard.runs.checks import installed_packages
from reshard.runs.checks.installed_packages import installed

ENVIRONMENT_PACKAGES = (
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
    *("flash-attn", "vllm", "safetensors", "tokenizers", "datasets", "numpy"),
)
ENVIRONMENT_VARIABLES = (
    *(
        "WORLD_SIZE",
        "RANK",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "CUDA_VISIBLE_DEVICES",
    ),
    *("HF_HOME", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "NCCL_SOCKET_IFNAME", "NCCL_P2P_DISABLE"),
)


@dataclass(frozen=True)
class Gpu:
    """A GPU according to the driver. `capability` is 7.0 for a V100, 8.0 for an A100; `memory` is in bytes."""

    name: str
    capability: float
    memory: int


@dataclass
class Environment:
    """An environment: package versions and requirements, GPUs, driver, libraries, environment variables.

    `cuda` is the CUDA for which torch was built: "" if it was built without, None if unknown. `shm` is the size of
    /dev/shm in bytes.
    """

    versions: dict[str, str]
    gpus: list[Gpu]
    driver: str | None
    variables: Mapping[str, str]
    requires: dict[str, list[str]] = field(default_factory=dict)
    cuda: str | None = None
    nccl: str | None = None
    shm: int | None = None
    python: str = ""
    """Version and path of the interpreter to which the packages belong."""
    markers: Mapping[str, str] = field(default_factory=dict)
    """What conditions of requirements say about this interpreter, where another than reshard's is examined."""

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
        """The lowest compute capability of all GPUs."""
        return min((gpu.capability for gpu in self.gpus), default=None)

    @property
    def visible(self) -> list[Gpu]:
        """The GPUs that CUDA_VISIBLE_DEVICES selects; by index, otherwise as many as it names."""
        setting = self.variables.get("CUDA_VISIBLE_DEVICES")
        if setting is None:
            return list(self.gpus)
        names = [name.strip() for name in setting.split(",") if name.strip()]
        if all(name.isdecimal() for name in names):
            return [self.gpus[int(name)] for name in names if int(name) < len(self.gpus)]
        return [] if names[0].startswith("-") else list(self.gpus[: len(names)])

    def as_dict(self) -> dict[str, Any]:
        """What `reshard doctor` shows, in its order; None for what is missing."""
        return {
            "python": self.python,
            **{package: self.versions.get(package) for package in ENVIRONMENT_PACKAGES},
            "CUDA of torch": "none (CPU build)" if self.cuda == "" else self.cuda,
            "NCCL": self.nccl,
            "driver": self.driver,
            "GPUs": [
                f"{gpu.name}, compute capability {gpu.capability}, {gpu.memory >> 30} GiB"
                for gpu in self.gpus
            ],
            "/dev/shm": None if self.shm is None else f"{self.shm >> 20} MiB",
            "variables": {
                name: self.variables[name] for name in ENVIRONMENT_VARIABLES if name in self.variables
            },
        }


def look_around(python: str | None = None) -> Environment:
    """The environment of this process, or of another interpreter. Nothing in it is imported.

    Raises ReshardError if there is no such interpreter.
    """
    seen = installed(list(PACKAGE_NAMES)) if python is None else _packages_of(python)
    return environment_of(seen, *find_gpus())


def environment_of(seen: Mapping[str, Any], gpus: list[Gpu], driver: str | None) -> Environment:
    """The environment that an interpreter has described (`installed_packages.py`)."""
    nccl = (seen["versions"].get(f"nvidia-nccl-cu{major}") for major in (13, 12, 11))
    return Environment(
        {name: version for name, version in seen["versions"].items() if name in ENVIRONMENT_PACKAGES},
        gpus,
        driver,
        seen["variables"],
        requires=seen["requires"],
        cuda=_cuda(seen["torch"]),
        nccl=next((each for each in nccl if each), None),
        shm=disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        python=f"{seen['markers']['python_full_version']} ({seen['executable']})",
        markers=seen["markers"],
    )


PACKAGE_NAMES = (*ENVIRONMENT_PACKAGES, *(f"nvidia-nccl-cu{major}" for major in (13, 12, 11)))
TIMEOUT_SECONDS = 60
"""Seconds that another interpreter may take to start."""


def ask(
    interpreter: Sequence[str],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    *,
    patience: float,
    **request: Any,
) -> dict[str, Any]:
    """What `interpreter`, the words that start it, says about itself. `request` has more arguments of the probe.

    Raises OSError, SubprocessError or ValueError if it does not answer.
    """
    # `conda run` refuses arguments with newlines, so the text is an expression of one line.
    command = [*interpreter, "-c", f"exec({Path(installed_packages.__file__).read_text('utf-8')!r})"]
    ran = subprocess.run(
        [*command, json.dumps({"names": PACKAGE_NAMES, **request})],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patience,
        check=True,
    )
    answer: dict[str, Any] = json.loads((ran.stdout.splitlines() or [""])[-1])
    return answer


def _packages_of(python: str) -> dict[str, Any]:
    """The packages of another interpreter, as it reports them; `python` may be the folder of its environment."""
    path = which(python) or which(str(Path(python, "bin/python")))
    try:
        if path is None:
            raise FileNotFoundError(None, _instead_of_a_program(Path(python)))
        return ask([path], patience=TIMEOUT_SECONDS)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ReshardError(
            "interpreter-not-found",
            "not a working Python interpreter",
            file=python,
            expected="Python 3.8 or later",
            found=why_silent(error),
            remedy="pass the interpreter of the training environment, such as /opt/venv/bin/python",
        ) from None


def _instead_of_a_program(path: Path) -> str:
    """What is at a path that cannot be executed."""
    if path.is_dir():
        return "a folder without bin/python"
    return "a file that is not executable" if path.is_file() else "no such program"


def why_silent(error: Exception) -> str:
    """Why an interpreter did not answer."""
    if isinstance(error, subprocess.CalledProcessError):
        *_, last = ["", *(line.strip() for line in error.stderr.splitlines() if line.strip())]
        return f"exit status {error.returncode}" + (f": {last}" if last else "")
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer after {error.timeout:g} s"
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it does not execute Python code"


def unmet(environment: Environment) -> Iterator[tuple[str, Requirement]]:
    """Each package with a requirement that the installed version of another package does not meet."""
    for package in environment.versions:
        for line in environment.requires.get(package, ()):
            with suppress(InvalidRequirement):
                needs = Requirement(line)
                needs.name = needs.name.lower().replace("_", "-")
                concerns = needs.marker is None or needs.marker.evaluate({**environment.markers, "extra": ""})
                installed = needs.name in environment.versions
                if concerns and installed and not environment.has(needs.name, str(needs.specifier)):
                    yield package, needs


def _cuda(torch: str | None) -> str | None:
    """The CUDA for which torch was built, read from the text of its version.py."""
    path = Path(torch).with_name("version.py") if torch else None
    if path is None or not path.is_file():
        return None
    match = re.search(r"^cuda\b[^=\n]*= *(?:'([\d.]+)'|None)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return (match[1] or "") if match else None


def find_gpus() -> tuple[list[Gpu], str | None]:
    """GPUs and driver from nvidia-smi; importing torch would take seconds."""
    if which("nvidia-smi") is None:
        return [], None
    fields = "name,compute_cap,memory.total,driver_version"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return [], None
    return parse_smi(output)


def parse_smi(output: str) -> tuple[list[Gpu], str | None]:
    """GPUs and driver from lines of name, compute capability, MiB and driver. Memory may be `[N/A]`."""
    rows = [[part.strip() for part in row.split(",")] for row in output.splitlines() if row.count(",") == 3]
    gpus = [
        Gpu(name, float(capability), int(memory) << 20 if memory.isdecimal() else 0)
        for name, capability, memory, _ in rows
        if re.fullmatch(r"\d+\.\d+", capability)
    ]
    return gpus, rows[0][3] if rows else None
