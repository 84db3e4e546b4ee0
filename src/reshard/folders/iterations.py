"""The folders of a Megatron run: a tracker file, and a folder for each iteration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError
from reshard.stores import open_file

Iteration = int | str
"""The step of a training run, or "release", Megatron-LM's name for weights that none of its runs wrote."""

TRACKER = "latest_checkpointed_iteration.txt"
MAX_TRACKER_CHARACTERS = 20
"""A tracker file is shorter than this, in characters."""
_NAME = re.compile(r"iter_(\d{7,})")


def name_of(iteration: Iteration) -> str:
    """The folder name of an iteration."""
    return "release" if iteration == "release" else f"iter_{int(iteration):07d}"


def _step(folder: Path) -> Iteration | None:
    if folder.name == "release":
        return "release"
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def _real(folder: Path) -> Path:
    """`folder` resolved to the name with its iteration, if it was passed as `.` or as a link with another name."""
    return folder if _step(folder) is not None or not folder.is_dir() else folder.resolve()


def is_iteration(folder: Path) -> bool:
    """Whether `folder` has a name that Megatron-LM gives to iteration folders."""
    return _step(_real(folder)) is not None


def iterations_in(root: Path) -> dict[Iteration, Path]:
    """All iterations below `root`, the latest last."""
    if not root.is_dir():
        return {}
    steps = {step: child for child in root.iterdir() if (step := _step(child)) is not None and child.is_dir()}
    return dict(
        sorted(steps.items(), key=lambda item: (item[0] != "release", item[0] if item[0] != "release" else 0))
    )


def iteration_folders(path: Path) -> list[Path]:
    """The folders that may hold an iteration: `path` itself, and those below it."""
    return [path, *iterations_in(path).values()] if path.is_dir() else []


def root_of(folder: Path) -> Path:
    """The run folder of an iteration folder, with configs and tokenizers."""
    real = _real(folder)
    return real.parent if _step(real) is not None else folder


def config_folder(folder: Path) -> Path:
    """The folder with config and tokenizer of an iteration: its own if it has a config, or else the run folder."""
    return folder if (folder / "config.json").is_file() else root_of(folder)


def choose(path: Path, iteration: Iteration | None = None) -> tuple[Path, Iteration | None]:
    """The folder of the requested or else the tracked iteration. Raises ReshardError if there is none."""
    steps = iterations_in(path)
    if not steps:
        step = _step(_real(path))
        if iteration is not None and step not in (None, iteration):
            raise ReshardError(
                "iteration-contradicts-path",
                "--iteration and the path name different iterations",
                file=str(path),
                expected=f"iteration {iteration}",
                remedy="pass the folder above it, or leave out --iteration",
            )
        return path, step
    listed = f"iteration{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
    if iteration is not None:
        if iteration not in steps:
            raise ReshardError(
                "iteration-not-found",
                "this iteration does not exist",
                file=str(path / name_of(iteration)),
                found=listed,
                remedy="choose one of these with --iteration",
            )
        return steps[iteration], iteration
    tracked = _tracked(path / TRACKER, listed)
    if tracked not in steps:
        raise ReshardError(
            "tracked-iteration-missing",
            "the iteration that the tracker names is missing",
            file=str(path / name_of(tracked)),
            expected=f"iteration {tracked}, as {TRACKER} says",
            found=listed,
            remedy="copy the missing folder, or choose another with --iteration, or name its folder",
        )
    return steps[tracked], tracked


def _tracked(tracker: Path, listed: str) -> Iteration:
    if not tracker.is_file():
        raise ReshardError(
            Problem(
                "tracker-missing",
                "the tracker file is missing, so the latest iteration is not known",
                file=str(tracker),
                rule="the tracker names the last iteration that was saved completely",
                found=listed,
                remedy="choose one with --iteration N, or name its folder",
            )
        )
    # Not read through `sources`: a running job rewrites it, and it is not needed once the iteration is chosen.
    with open_file(tracker) as file:
        text = file.read(0, MAX_TRACKER_CHARACTERS + 1).decode("utf-8", "replace").strip()
    if text != "release" and not (text.isascii() and text.isdigit() and len(text) < MAX_TRACKER_CHARACTERS):
        raise ReshardError(
            "tracker-unreadable",
            "the tracker file cannot be read",
            file=str(tracker),
            expected='an iteration, or "release"',
            found=repr(text[:40]),
            remedy="choose an iteration with --iteration N, or name its folder",
        )
    return "release" if text == "release" else int(text)


def refuse(path: Path, iteration: Iteration | None, what: str) -> None:
    """Raise ReshardError if an iteration is requested from a format that has no iteration folders."""
    if iteration is not None:
        raise ReshardError(
            "iterations-not-found",
            f"{what} has no iterations",
            file=str(path),
            found=f"--iteration {iteration}",
            remedy="leave out --iteration",
        )


def renamed_note(folder: Path, iteration: Any) -> list[str]:
    """A note if the files of `folder` record another iteration than its name does."""
    named = _step(_real(folder))
    if not isinstance(named, int) or not isinstance(iteration, int) or named == iteration:
        return []
    return [f"{folder.name} was renamed: its files are of iteration {iteration}"]
