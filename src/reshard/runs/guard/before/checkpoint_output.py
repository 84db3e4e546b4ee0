"""The folder of a run's checkpoints, before the run starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from reshard.base.errors import Problem, listed
from reshard.runs.checks.command.read_command import TrainingCommand
from reshard.runs.guard.before.resources import models_of
from reshard.runs.guard.options import GuardOptions


def of_options(options: GuardOptions, command: TrainingCommand) -> Iterator[Problem]:
    """Problems of the folders that the guard's own options name."""
    if options.output:
        yield from unwritable(options.output, "--output", is_folder=True)
    if options.final:
        yield from unwritable(options.final.absolute().parent, "--final", is_folder=True)
        yield from _taken(options.final, command, overwrite=options.overwrite)
    else:
        yield from _needs_final(options)


def _needs_final(options: GuardOptions) -> Iterator[Problem]:
    """A problem if there are options that only `--final` reads."""
    given = {"--merge": options.merge, "--base": options.base, "--overwrite": options.overwrite}
    if names := [name for name, value in given.items() if value]:
        yield Problem(
            "final-option-alone",
            f"{listed(names)} needs --final" if len(names) == 1 else f"{listed(names)} need --final",
            rule="these options say how --final makes its folder",
            remedy=f"add --final DIR, or leave out {listed(names)}",
            values={"names": listed(names)},
        )


def _taken(final: Path, command: TrainingCommand, *, overwrite: bool) -> Iterator[Problem]:
    """A problem if the folder of `--final` is used by the command, or is not empty, as `convert` sees it."""
    from reshard.final.final_folder import draft_of  # imports numpy, which a good run does not need

    draft = draft_of(final)
    used = [command.folder / name for name in (".", command.output or ".", *models_of(command))]
    if any(each.resolve().is_relative_to(final.resolve()) for each in used):
        yield Problem(
            "final-in-use",
            "the folder of --final is one that the command uses",
            file=str(final),
            rule="--final replaces a model that is in its folder",
            remedy="choose another folder: --final DIR",
        )
    elif final.is_dir() and not _is_of_reshard(final) and _has_model(final):
        yield Problem(
            "final-has-a-model",
            "the folder of --final contains a model that reshard did not write",
            file=str(final),
            rule="--final replaces a model that is in its folder",
            remedy="choose another folder, or move this one away first",
        )
    elif not overwrite and (final.is_file() or _entries(final)):
        yield Problem(
            "final-not-empty",
            "the folder of --final is not empty",
            file=str(final),
            found=listed(_entries(final), 5) or "a file",
            rule="what it contains may be another model",
            remedy="choose another folder: --final DIR, or pass --overwrite to replace it",
        )
    if draft.is_dir() and _entries(draft) and not _is_of_reshard(draft):
        yield Problem(
            "final-draft-taken",
            "the folder in which --final is checked contains files that reshard did not write",
            file=str(draft),
            rule="reshard replaces it before it makes the folder of --final",
            remedy="choose another folder: --final DIR, or move this one away first",
        )


def _entries(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []


def _has_model(folder: Path) -> bool:
    from reshard.formats import detect  # takes a while

    return detect(folder) is not None


def unwritable(output: Path, option: str, *, is_folder: bool = False) -> Iterator[Problem]:
    """Problems if the output cannot be created or written to; if it is a file, only where it must be a folder."""
    place = next(path for path in (output, *output.parents) if path.exists())
    if not place.is_dir() and (is_folder or place != output):
        yield Problem(
            "output-below-a-file",
            "the output folder cannot be created: a file has its name",
            file=str(place),
            found=f"{option} {output}",
            remedy=f"choose another folder with {option}",
        )
    elif place.is_dir() and not os.access(place, os.W_OK | os.X_OK):
        yield Problem(
            "output-not-writable",
            "the output cannot be written to",
            file=str(place),
            found="no permission to write",
            remedy=f"choose another folder with {option}, or change its permissions",
        )


CHECKPOINT_FOLDERS = (
    "checkpoint-*",
    "global_step*",
    "iter_*",
    "latest_checkpointed_iteration.txt",
    "v*-*/checkpoint-*",
)
"""What the checkpoints of the Trainer, DeepSpeed, verl, Megatron and ms-swift are called in a run's folder."""


def occupied(output: Path) -> Iterator[Problem]:
    """A warning if there are checkpoints in the output from which the run does not continue."""
    names = sorted(path.name for pattern in CHECKPOINT_FOLDERS for path in output.glob(pattern))
    if names:
        yield Problem(
            "output-has-checkpoints",
            "the output contains checkpoints of another run",
            file=str(output),
            rule="both runs then share one folder: new checkpoints replace old ones of the same step, and a limit on "
            "their number counts and deletes both",
            found=listed(names, 3),
            remedy="resume from them, or choose another folder",
            severity="warning",
        )


def _is_of_reshard(folder: Path) -> bool:
    from reshard.folders.companion_names import RECORD

    return (folder / RECORD).is_file()
