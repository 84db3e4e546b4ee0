"""What options of a run are called: by reshard, and by TRL's scripts and Hugging Face, which have names of their own.

Dashes and underscores mean the same in all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from reshard.errors import Problem, ReshardError
from reshard.suggest import closest
from reshard.train.run import SIZES

PATHS = ("model", "output")
NEEDED = ("model", "data", "output")
OF_DATASETS = ("dataset_config", "dataset_train_split", "dataset_test_split")
"""Which part of a dataset of the hub is read; TRL has the same names."""
OURS = {
    *(*NEEDED, "eval_data", "data_shape", "system", "token_cache", "engine", "lora", "parallel", *SIZES),
    *("nproc", "nnodes", "node_rank", "rendezvous", "reward", "resume", "merge", "nan_steps"),
    *("save_on_signal", "max_restarts", "model_revision", *OF_DATASETS),
}
"""What reshard takes itself; every other name is an option of the engine."""
OF_COMMANDS = (
    *("config", "dry_run", "gpus", "gpu_memory", "overwrite", "options", "slurm", "quiet", "json", "debug"),
    "help",
)
"""Flags that say nothing about the run."""
ALIASES = {
    "model_name_or_path": "model",
    "dataset_name": "data",
    "output_dir": "output",
    "use_peft": "lora",
}
"""Names of TRL's `ModelConfig`, `ScriptArguments` and of transformers' `TrainingArguments` for what is ours."""


def flag(name: str) -> str:
    """As it is typed: reshard's own flags have dashes, options of engines underscores."""
    return f"--{name.replace('_', '-') if name in OURS or name in OF_COMMANDS else name}"


def renamed(given: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Options under our names. Raises ReshardError for what is said twice, with two values."""
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    problems = []
    for name, value in given.items():
        ours = ALIASES.get(name, name)
        if ours in found and str(found[ours]) != str(value):
            problems.append(
                Problem(
                    "option-given-twice",
                    f"{flag(ours)} is given twice, with different values",
                    file=place or None,
                    found=f"{spelled[ours]}: {found[ours]}, {name}: {value}",
                    remedy=f"leave out one of {spelled[ours]} and {name}",
                )
            )
        found[ours], spelled[ours] = value, name
    if problems:
        raise ReshardError(problems)
    return found


def misspelled(wanted: str, given: Iterable[str]) -> str | None:
    """Which of the names that were given may be a misspelling of one of ours."""
    spellings = [wanted, *(alias for alias, ours in ALIASES.items() if ours == wanted)]
    return next((name for name in given if closest(name, spellings, cutoff=0.75)), None)


def nearest(name: str, known: Collection[str], elsewhere: Mapping[str, str]) -> str | None:
    """What to type in the place of an option that there is not; `elsewhere` are names that others have for it."""
    if name.removeprefix("no_") in known:
        return f"--{name.removeprefix('no_')} false switches it off"
    names = [*known, *sorted(OURS), *OF_COMMANDS, *ALIASES]
    near = closest(elsewhere.get(name, name), names)
    return f"did you mean {flag(near[0])}?" if near else None
