"""From options to a written recipe: what can be checked before a start is checked first, and then run.sh is started."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.base.interrupts import ignored
from reshard.final.saved_checkpoints import FoundCheckpoint, saved_in
from reshard.runs.checks.command.read_command import StartedProgram, read_command
from reshard.runs.guard.end.resume import resume_of
from reshard.runs.train.methods import TRAINING_METHODS
from reshard.runs.train.options import TrainOptions
from reshard.runs.train.recipe import FINAL, RUN, Recipe
from reshard.runs.train.swift_recipe import swift_recipe
from reshard.runs.train.trl_recipe import trl_recipe


@dataclass(frozen=True)
class Engine:
    """What trains. `recipe` writes a recipe for it from a method, the options, and words that are its own options.

    `options` are those of `TrainOptions` that other engines do not have.
    """

    recipe: Callable[[str, TrainOptions, list[str]], Recipe]
    methods: tuple[str, ...]
    options: tuple[str, ...]


ENGINES = {
    "trl": Engine(trl_recipe, tuple(TRAINING_METHODS), ("reward", "parallel")),
    "ms-swift": Engine(swift_recipe, ("sft",), ("tp", "pp", "ep")),
}


@dataclass(frozen=True)
class TrainingRun:
    """A recipe in `folder`, and the command that starts it."""

    folder: Path
    command: tuple[str, ...]
    status: int | None = None
    """Its exit status, if it was started and has ended."""

    def __bool__(self) -> bool:
        """Whether the run did not fail."""
        return not self.status

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"output": str(self.folder), "command": list(self.command), "status": self.status}


def prepared(method: str, options: TrainOptions, rest: Sequence[str] = ()) -> TrainingRun:
    """Write a recipe, or find the one to resume. Raises ReshardError with every problem, before anything is written."""
    if options.output is None:
        raise ReshardError(_missing("output", "-o out"))
    folder = Path(options.output).expanduser().absolute()
    if options.resume:
        return _resumed(folder, rest)
    raise_all(
        [
            *(
                _missing(name, f"--{name} {name.upper()}")
                for name in ("model", "data")
                if not getattr(options, name)
            ),
            *_not_a_model(options),
            *_of_other_engines(method, options),
            *_occupied(folder, options),
        ]
    )
    recipe = ENGINES[options.engine].recipe(method, options, list(map(_with_underscores, rest)))
    if options.overwrite:
        shutil.rmtree(folder / FINAL, ignore_errors=True)
    recipe.write(folder)
    return TrainingRun(folder, ("bash", str(folder / RUN)))


def _missing(name: str, example: str) -> Problem:
    return Problem("option-missing", f"--{name} is missing", remedy=f"add {example}")


def _not_a_model(options: TrainOptions) -> Iterator[Problem]:
    """The problem of a path without the config of a model or an adapter. Other words are names on the Hub."""
    model = Path(str(options.model)).expanduser()
    if (model.exists() or str(options.model).startswith((".", "/", "~"))) and not any(
        (model / name).is_file() for name in ("config.json", "adapter_config.json")
    ):
        yield Problem(
            "model-not-huggingface",
            "--model is not a Hugging Face model folder",
            file=str(model),
            expected="a folder that contains config.json",
            remedy="correct the path, or convert the checkpoint first: reshard convert CKPT model",
        )


def _of_other_engines(method: str, options: TrainOptions) -> Iterator[Problem]:
    """The problems of a method and of options that the engine does not have."""
    name, methods = options.engine, ENGINES[options.engine].methods
    if method not in methods:
        yield Problem(
            "method-not-of-engine",
            f"recipes for {name} do not train with {method}",
            expected=" or ".join(methods),
            remedy="leave out --engine to train with TRL, or start the engine's own command under `reshard guard`",
        )
    for other, engine in ENGINES.items():
        for option in engine.options if other != name else ():
            if (getattr(options, option) or None) != getattr(TrainOptions, option):
                yield Problem(
                    "option-not-of-engine",
                    f"--{option} is for {other}, and this recipe is for {name}",
                    remedy=f"leave out --{option}, or pass --engine {other}",
                )


def _occupied(folder: Path, options: TrainOptions) -> list[Problem]:
    """The problem of a folder that has a recipe or anything else in it."""
    if folder.is_file():
        return [
            Problem(
                "output-is-file",
                "the output is a file",
                file=str(folder),
                remedy="choose a new folder: -o DIR",
            )
        ]
    if options.overwrite or not folder.exists() or not any(folder.iterdir()):
        return []
    has_recipe = (folder / RUN).exists()
    return [
        Problem(
            "output-has-recipe" if has_recipe else "output-not-empty",
            "the output folder has a recipe already" if has_recipe else "the output folder is not empty",
            file=str(folder),
            remedy=f"start it again with `bash {folder / RUN}`, continue with --resume, replace it with --overwrite, "
            "or choose another folder"
            if has_recipe
            else "choose another folder, or pass --overwrite to write the recipe beside what is there",
        )
    ]


def _resumed(folder: Path, rest: Sequence[str]) -> TrainingRun:
    """The recipe of a folder, continued from its last complete checkpoint; options are added to its own."""
    if not (folder / RUN).is_file():
        raise ReshardError(
            "recipe-not-found", "no recipe to resume", file=str(folder / RUN), remedy="check --output"
        )
    last = saved_in(folder).last
    more = _continuing(folder, last) if last else ()
    return TrainingRun(folder, ("bash", str(folder / RUN), *more, *map(_with_underscores, rest)))


def _continuing(folder: Path, last: FoundCheckpoint) -> tuple[str, ...]:
    """Options that continue the command of run.sh, which may have been changed, from a checkpoint."""
    command = read_command(("bash", RUN), os.environ, folder)
    resume = resume_of(StartedProgram(("python", *command.arguments), command.script, command.module), last)
    if not resume.options:
        raise ReshardError(
            "recipe-not-resumable",
            "the recipe has no option to continue from a checkpoint",
            file=str(folder / RUN),
            found=str(last.path),
            remedy=resume.advice,
        )
    return resume.options


def _with_underscores(word: str) -> str:
    """An option as the engines spell it."""
    name, equals, value = word.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if word.startswith("--") else word


def start(run: TrainingRun) -> None:
    """Become run.sh: its process is this one, so that signals and the exit status are its own."""
    os.execvp(run.command[0], run.command)


def started(run: TrainingRun, stdout: int | None = None) -> TrainingRun:
    """Start run.sh, with its stdout on this descriptor, and wait for its end."""
    process = subprocess.Popen(run.command, stdout=stdout)
    with ignored():  # Ctrl-C is for the run, which ends in its own way
        return replace(run, status=process.wait())
