"""Asks the Python of a command what it has installed, in that command's environment and folder."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reshard.runs.checks.command.read_command import TrainingCommand
from reshard.runs.checks.command.wrapper_programs import sync_check
from reshard.runs.checks.environment import (
    PACKAGE_NAMES,
    Environment,
    ask,
    environment_of,
    find_gpus,
    why_silent,
)

ASKED_PACKAGES = (
    "bitsandbytes",
    "diffusers",
    "huggingface-hub",
    "lightning",
    "llamafactory",
    "ms-swift",
    "axolotl",
    "verl",
)
"""Packages with a history of releases, besides those of the environment."""
TIMEOUT_SECONDS = 10.0
"""Seconds for the answer."""


@dataclass(frozen=True)
class PythonAnswer:
    """What the command's Python says. `silence` is why it says nothing, and `environment` is then None."""

    environment: Environment | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of all packages that the doctor's history knows."""
    missing: tuple[str, ...] = ()
    """Modules that it does not find."""
    silence: str = ""


def python_answer(command: TrainingCommand) -> PythonAnswer:
    """Ask it, which takes at most `TIMEOUT_SECONDS` seconds."""
    seen = _raw_answer(command)
    if isinstance(seen, str):
        return PythonAnswer(silence=seen)
    missing = tuple(name for name, there in seen["modules"].items() if not there)
    return PythonAnswer(environment_of(seen, *find_gpus()), seen["versions"], missing)


def _raw_answer(command: TrainingCommand) -> dict[str, Any] | str:
    """The answer, or why there is none."""
    if command.interpreter is None:
        return "the command does not show which Python it starts"
    modules = [command.module] if command.module else []
    try:
        if _is_outdated(command):
            return "uv changes them before the start; run `uv sync` first to have them checked"
        return ask(
            command.interpreter,
            command.environment,
            command.folder,
            patience=TIMEOUT_SECONDS,
            names=[*PACKAGE_NAMES, *ASKED_PACKAGES],
            modules=modules,
            paths=[str(command.folder)],
        )
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"{' '.join(command.interpreter)}: {why_silent(error)}"


def _is_outdated(command: TrainingCommand) -> bool:
    """Whether the packages that are installed now are not those of the run."""
    command_line = sync_check(command.interpreter or ())
    if not command_line or "--no-sync" in command.words:
        return False
    checked = subprocess.run(
        command_line,
        check=False,
        env=command.environment,
        cwd=command.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT_SECONDS,
    )
    return checked.returncode == 1
