"""A recipe: the files of a run that `reshard train` writes, and that work without it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from reshard.training.methods import TrainingMethod
from reshard.training.options import TrainOptions
from reshard.training.trl_script import TrlScript, accelerate_config

RUN, SCRIPT, ACCELERATE = "run.sh", "train.py", "accelerate.yaml"
FINAL, LOG = "final", "log"
"""Folders in the output."""


@dataclass(frozen=True)
class Recipe:
    """The files of a recipe by name, and the command that they run under guard, in the folder of the recipe."""

    files: dict[str, str]
    command: tuple[str, ...]
    merge: bool = False

    def write(self, folder: Path) -> None:
        """Write all files, run.sh as an executable."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {**self.files, RUN: self._run()}.items():
            (folder / name).write_text(text, encoding="utf-8")
        (folder / RUN).chmod(0o755)

    def _run(self) -> str:
        guard = [
            "reshard",
            "guard",
            "--log",
            LOG,
            "--final",
            FINAL,
            "--overwrite",  # a folder that another run of the recipe has made
            *(["--merge"] if self.merge else []),
            "--",
        ]
        lines = " \\\n  ".join([shlex.join(guard), *_lines(self.command), '"$@"'])
        return (
            "#!/usr/bin/env bash\n"
            "# Starts the run, and watches over it. Options after run.sh are added to its own, for example\n"
            "# --resume_from_checkpoint checkpoint-100. Without a guard: the lines after `--`.\n"
            "set -euo pipefail\n"
            'cd "$(dirname "${BASH_SOURCE[0]}")"\n'
            f"PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH\n"
            f"exec {lines}\n"
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


def trl_recipe(
    method: TrainingMethod, script: TrlScript, options: TrainOptions, nproc: int, rest: Sequence[str]
) -> Recipe:
    """A recipe for TRL. `rest` are fields of TRL's config and of its ModelConfig, as words."""
    cpu = uses_cpu(rest)
    words = [
        *_launcher(options, nproc, cpu=cpu),
        *("--model_name_or_path", model_word(options)),
        *("--output_dir", "."),
        *(_lora_options(method, rest) if options.lora else ()),
        *(("--eval_strategy", "epoch") if options.eval_data and "--eval_strategy" not in rest else ()),
        *rest,
    ]
    files = {SCRIPT: script.text()}
    if ACCELERATE in words:
        config = accelerate_config(options.parallel, method, nproc, options.nnodes, cpu=cpu)
        files[ACCELERATE] = yaml.safe_dump(config, sort_keys=False)
    return Recipe(files, tuple(words), merge=options.lora and options.merge)


def _lora_options(method: TrainingMethod, rest: Sequence[str]) -> tuple[str, ...]:
    """Adapters on all linear layers: PEFT's own default adapts two projections of attention only."""
    layers = () if "--lora_target_modules" in rest else ("--lora_target_modules", "all-linear")
    return ("--use_peft", "true", *layers, *method.lora_options)


def uses_cpu(rest: Sequence[str]) -> bool:
    """Whether the run trains on the CPU, by TRL's own option."""
    return given_options(rest).get("use_cpu", "false").lower() != "false"


def given_options(words: Sequence[str]) -> dict[str, str]:
    """Options of the engine by name; one without a value is true."""
    given = {}
    for word, following in zip(words, (*words[1:], "--"), strict=False):
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            given[name[2:]] = value if equals else ("true" if following.startswith("--") else following)
    return given


def model_word(options: TrainOptions) -> str:
    """The model as the recipe names it: a folder by its absolute path, or a name on the Hub."""
    folder = Path(str(options.model)).expanduser()
    return str(folder.absolute()) if folder.exists() else str(options.model)


def _launcher(options: TrainOptions, nproc: int, *, cpu: bool) -> list[str]:
    if nproc * options.nnodes == 1:
        return ["python", SCRIPT]
    if cpu:  # accelerate has no plans for CPUs
        return ["torchrun", "--standalone", "--nproc-per-node", str(nproc), SCRIPT]
    launch = ["accelerate", "launch", "--config_file", ACCELERATE]
    if options.nnodes > 1:
        launch += ["--machine_rank", "${NODE_RANK:-${SLURM_NODEID:-0}}"]
        launch += ["--main_process_ip", "${MASTER_ADDR:?set it to the first node}"]
        launch += ["--main_process_port", "${MASTER_PORT:-29500}"]
    return [*launch, SCRIPT]
