"""From options to a written recipe: what can be checked before a start is checked first, and then run.sh is started."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError
from reshard.base.interrupts import ignored
from reshard.checks.environment import look_around
from reshard.guard.data.data_files import DATA_SUFFIXES, check_records, files_of
from reshard.guard.end.saved_checkpoints import saved_in
from reshard.training.assistant_labels import marks_turns
from reshard.training.memory.gpu_models import gpus_named
from reshard.training.memory.run_memory import check_memory
from reshard.training.methods import TRAINING_METHODS, TrainingMethod
from reshard.training.options import TrainOptions
from reshard.training.recipe import FINAL, RUN, Recipe, model_word, trl_recipe, uses_cpu
from reshard.training.trl_script import HUB, RecipeData, TrlScript

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""The name of a model or dataset on the Hub."""


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
    problems = [
        *(
            _missing(name, f"--{name} {name.upper()}")
            for name in ("model", "data")
            if not getattr(options, name)
        ),
        *_occupied(folder, options),
    ]
    if problems:
        raise ReshardError(problems)
    recipe = _recipe(TRAINING_METHODS[method], method, options, list(map(_with_underscores, rest)))
    if options.overwrite:
        shutil.rmtree(folder / FINAL, ignore_errors=True)
    recipe.write(folder)
    return TrainingRun(folder, ("bash", str(folder / RUN)))


def _missing(name: str, example: str) -> Problem:
    return Problem("option-missing", f"--{name} is missing", remedy=f"add {example}")


def _occupied(folder: Path, options: TrainOptions) -> list[Problem]:
    """The problem of a folder that has a recipe or anything else in it."""
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
    more = ("--resume_from_checkpoint", str(last.path)) if last else ()
    return TrainingRun(folder, ("bash", str(folder / RUN), *more, *map(_with_underscores, rest)))


def _with_underscores(word: str) -> str:
    """An option as TRL spells it."""
    name, equals, value = word.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if word.startswith("--") else word


def _recipe(method: TrainingMethod, name: str, options: TrainOptions, rest: list[str]) -> Recipe:
    """The recipe for TRL. Raises ReshardError with every problem of data, rewards and machine."""
    problems = _Problems()
    data = problems.of(lambda: _data(options.data, name))
    eval_data = problems.of(lambda: _data(options.eval_data, name) if options.eval_data else None)
    rewards = problems.of(lambda: tuple(map(_reward, options.reward or ())))
    problems.found += _reward_count(method, options)
    nproc = problems.of(lambda: _processes(options, cpu=uses_cpu(rest)))
    problems.settle()
    problems.found += check_memory(method, options, nproc, rest)
    problems.settle()
    masks = (
        name == "sft" and "--assistant_only_loss" not in rest and data.shape in ("chat", "ShareGPT", "Alpaca")
    )
    if masks and _template_marks_turns(options):
        masks, rest = False, [*rest, "--assistant_only_loss", "true"]
    script = TrlScript(method, data, eval_data, rewards, masks)
    return trl_recipe(method, script, options, nproc, rest)


class _Problems:
    """Collects the problems of several steps."""

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
        if self.found:
            raise ReshardError(self.found)


def _data(given: Any, method: str) -> RecipeData:
    """Data by their format and the shape of their records, every one of which is checked."""
    names = [str(given)] if isinstance(given, (str, Path)) else list(map(str, given))
    if len(names) == 1 and _is_on_hub(names[0]):
        return RecipeData(tuple(names), HUB)
    paths = [Path(each).expanduser().absolute() for each in names]
    shapes = sum((check_records(path, method) for path in paths), Counter[str]())
    files = [str(file) for path in paths for file in files_of(path)]
    formats = {"parquet" if file.endswith(".parquet") else "json" for file in files}
    if len(formats) > 1:
        raise ReshardError(
            "data-of-several-formats",
            "the data are JSON and Parquet files",
            found=", ".join(files[:4]),
            remedy="pass files of one format",
        )
    return RecipeData(tuple(files), formats.pop(), shapes.most_common(1)[0][0])


def _is_on_hub(name: str) -> bool:
    """Whether data can only be a dataset of the Hub."""
    is_name = HUB_NAME.fullmatch(name) and not name.endswith(DATA_SUFFIXES)
    return bool(is_name) and not Path(name).expanduser().exists()


def _reward(text: str) -> tuple[str, str]:
    """The file and the function of a reward."""
    file, _, function = text.rpartition(":")
    path = Path(file).expanduser().absolute()
    if not (file.endswith(".py") and function.isidentifier()):
        raise ReshardError(
            "reward-names-no-function",
            "--reward does not name a function",
            found=text,
            expected="FILE.py:NAME",
            remedy="for example --reward rewards.py:score, for the function score in rewards.py",
        )
    if not path.is_file():
        raise ReshardError(
            "reward-module-missing",
            "the file of --reward does not exist",
            file=str(path),
            remedy="check the path",
        )
    if not re.search(
        rf"^(async )?def {function}\b|^{function}\b", path.read_text("utf-8", "replace"), re.MULTILINE
    ):
        raise ReshardError(
            "reward-function-missing",
            "the file of --reward has no such function",
            file=str(path),
            expected=f"def {function}(completions, **columns) -> list of float",
            remedy="check the name after the colon",
        )
    return str(path), function


def _reward_count(method: TrainingMethod, options: TrainOptions) -> Iterable[Problem]:
    if method.rewarded and not options.reward:
        yield Problem(
            "reward-missing",
            f"{method.name} needs a reward",
            remedy="add --reward FILE.py:NAME, for a function that returns one number for each completion",
        )
    if options.reward and not method.rewarded:
        yield Problem(
            "reward-not-used",
            f"{method.name} uses no rewards",
            remedy="leave out --reward, or train with grpo",
        )


def _processes(options: TrainOptions, *, cpu: bool) -> int:
    """The number of processes on a node: as requested, or one for each GPU of this machine."""
    if options.parallel != "ddp" and cpu:
        raise ReshardError(
            "plan-needs-gpus",
            f"accelerate shards no model on CPUs: --parallel {options.parallel} would be plain data parallelism",
            remedy="leave out --use_cpu, or --parallel",
        )
    gpus = len(look_around().visible)
    if not (gpus or cpu or options.write_only or options.gpus):
        raise ReshardError(
            "no-gpu",
            "this machine has no GPU",
            remedy="write the recipe with --write-only and start run.sh on the cluster, or train on the CPU with "
            "--use_cpu true --bf16 false",
        )
    planned = gpus_named(options.gpus).count if options.gpus else gpus
    return options.nproc or max(planned, 1)


def _template_marks_turns(options: TrainOptions) -> bool:
    """Whether the chat template of the model's folder marks the assistant's turns."""
    folder = Path(model_word(options))
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        if (folder / name).is_file() and marks_turns((folder / name).read_text("utf-8", "replace")):
            return True
    return False


def start(run: TrainingRun) -> None:
    """Become run.sh: its process is this one, so that signals and the exit status are its own."""
    os.execvp(run.command[0], run.command)


def started(run: TrainingRun, stdout: int | None = None) -> TrainingRun:
    """Start run.sh, with its stdout on this descriptor, and wait for its end."""
    process = subprocess.Popen(run.command, stdout=stdout)
    with ignored():  # Ctrl-C is for the run, which ends in its own way
        return replace(run, status=process.wait())
