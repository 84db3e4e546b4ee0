"""A recipe: the files of a run that `reshard train` writes, and that work without it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.runs.checks.environment import look_around
from reshard.runs.train.options import TrainOptions

RUN, FINAL, LOG = "run.sh", "final", "log"
"""The script of a recipe, and folders beside it."""


@dataclass(frozen=True)
class Recipe:
    """The command of a recipe, which runs under guard in the recipe's folder, and the files by name that it needs.

    `environment` is exported first; variables of the cluster in it, and in the command, stay variables.
    """

    command: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    merge: bool = False

    def write(self, folder: Path) -> None:
        """Write all files, run.sh as an executable."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {**self.files, RUN: self._run()}.items():
            (folder / name).write_text(text, encoding="utf-8")
        (folder / RUN).chmod(0o755)

    def _run(self) -> str:
        merge = ["--merge"] if self.merge else []
        guard = ["reshard", "guard", "--log", LOG, "--final", FINAL, "--overwrite", *merge, "--"]
        exports = "".join(f"export {name}={_quoted(value)}\n" for name, value in self.environment.items())
        lines = " \\\n  ".join([shlex.join(guard), *_lines(self.command), '"$@"'])
        return (
            "#!/usr/bin/env bash\n"
            "# Starts the run, and watches over it. Options after run.sh are added to its own. Without a guard: the\n"
            "# lines after `--`. To continue: reshard train METHOD -o FOLDER --resume\n"
            "set -euo pipefail\n"
            'cd "$(dirname "${BASH_SOURCE[0]}")"\n'
            f"PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH\n"
            f"{exports}exec {lines}\n"
        )


def _lines(command: Sequence[str]) -> list[str]:
    """The command, with each option and its values on a line of its own."""
    lines: list[list[str]] = [[]]
    for word in command:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(_quoted(word))
    return [" ".join(line) for line in lines]


def _quoted(word: str) -> str:
    """A word for bash; variables of the cluster stay variables."""
    return f'"{word}"' if word.startswith("${") else shlex.quote(word)


def given_options(arguments: Sequence[str]) -> dict[str, str]:
    """Options of the engine by name; one without a value is true."""
    given = {}
    for word, following in zip(arguments, (*arguments[1:], "--"), strict=False):
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            given[name[2:]] = value if equals else ("true" if following.startswith("--") else following)
    return given


def model_word(options: TrainOptions) -> str:
    """The model as the recipe names it: a folder by its absolute path, or a name on the Hub."""
    folder = Path(str(options.model)).expanduser()
    return str(folder.absolute()) if folder.exists() else str(options.model)


def gpus_here(*, needed: bool, or_else: str = "") -> int:
    """The number of GPUs of this machine. Raises ReshardError if they are `needed` and there are none."""
    gpus = len(look_around().visible)
    if needed and not gpus:
        raise ReshardError(
            "no-gpu",
            "this machine has no GPU",
            remedy=f"write the recipe with --write-only and start run.sh on the cluster{or_else}",
        )
    return gpus


class Problems:
    """Collects the problems of several steps, to raise them together."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def of(self, step: Any) -> Any:
        """What a step returns; None if it raises ReshardError."""
        try:
            return step()
        except ReshardError as error:
            self.found += error.problems
            return None

    def settle(self) -> None:
        """Raise ReshardError if there are any."""
        raise_all(self.found)
