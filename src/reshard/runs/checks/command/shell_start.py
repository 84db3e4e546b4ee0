"""How a command is started, as by a shell."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import which

from reshard.base.errors import ReshardError
from reshard.base.foreign_text import printable_line
from reshard.base.suggest import did_you_mean
from reshard.runs.checks.command.interpreters import is_of_shell, program
from reshard.runs.checks.command.read_command import LAUNCHER_PROGRAMS, SHELL_PROGRAMS
from reshard.runs.checks.command.wrapper_programs import WRAPPER_PROGRAMS

KNOWN_PROGRAMS = (
    *LAUNCHER_PROGRAMS,
    *SHELL_PROGRAMS,
    *WRAPPER_PROGRAMS,
    "python",
    "python3",
    "srun",
    "mpirun",
)
"""Programs with which training commands begin."""


def as_started(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> list[str]:
    """The words to start. Raises ReshardError if there is no such program.

    A script whose first line names no program is run by the shell.
    """
    path = program(words[0], environment, folder)
    if path is None:
        raise ReshardError(
            "program-not-found",
            "the program of the command is not found",
            found=printable_line(words[0]),
            remedy=_instead(words[0]),
        )
    shell = "bash" if which("bash", path=environment.get("PATH", os.defpath)) else "sh"
    return [shell, str(path), *words[1:]] if is_of_shell(path) else list(words)


def _instead(word: str) -> str:
    if re.match(r"[A-Za-z_]\w*=", word):
        return "set variables by env: reshard guard -- env NAME=VALUE COMMAND …"
    known = () if word in KNOWN_PROGRAMS else KNOWN_PROGRAMS
    return did_you_mean(word, known, "check its name, and activate the environment that has it")
