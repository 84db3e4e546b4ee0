"""Errors for paths without a checkpoint: they suggest nearby ones that may be meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from reshard.base.errors import Problem, ReshardError, listed
from reshard.base.missing_packages import install_command
from reshard.base.suggest import similar_path
from reshard.folders.allowed_paths import can_list, folders_in
from reshard.folders.iterations import Iteration
from reshard.formats import foreign
from reshard.stores import is_remote
from reshard.stores.hub import HubStore

NOTHING_FOUND = "checkpoint-not-found"
PASS_WEIGHTS = "pass the folder that contains the weights; if this one should, download or copy them again"
"""The code and, if nothing nearby is one, the remedy for a path without a checkpoint."""
ABOVE, DEPTH, BELOW = 3, 5, 64
"""Levels of parent folders and of subfolders that are examined, and how many subfolders of each level."""


def nothing_there(path: Path) -> ReshardError:
    """The error for a path that does not exist, which may be the name of a model on the Hub."""
    neighbours = similar = None
    with suppress(ReshardError):  # a store may allow access to the path, but not to its parents
        similar = similar_path(path)
        near = next((parent for parent in path.absolute().parents if parent.exists()), None)
        if near is None:
            neighbours = f"{[path, *path.parents][-1]} is not there either"
        elif near.is_dir():
            neighbours = (
                f"{near} contains {listed(sorted(child.name for child in near.iterdir()), 8) or 'nothing'}"
            )
    return ReshardError(
        "path-not-found",
        "no such file or directory",
        file=str(path),
        found=f"a link to {path.readlink()}" if path.is_symlink() else neighbours,
        remedy=f"did you mean {similar}?"
        if similar
        else download(path, f"name {path.name}") or "check the path",
    )


def download(path: Path, then: str) -> str | None:
    """How to get a missing model, if the path may be the id or the URL of a model on the Hub.

    `then` says how to name the folder that the download makes.
    """
    hub = None if is_remote(path) else _hub_id(path)
    if hub is None:
        return None
    if (
        find_spec(HubStore.kind.package) is None
    ):  # without it, ids are not looked up, not even in the local cache
        return (
            f"{hub} looks like a model id on the Hub, which reshard reads with {HubStore.kind.package}: "
            f"{install_command(HubStore.kind.package)}; otherwise check the path"
        )
    return (
        f"{hub} looks like a model id on the Hub that was not downloaded: run hf download {hub} "
        f"--local-dir {path.name}, and then {then}; otherwise check the path"
    )


_ID = re.compile(r"[\w.-]+/[\w.-]+")


def _hub_id(path: Path) -> str | None:
    """`owner/name`, if the path may have been an id or a URL on the Hub."""
    typed = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    if path.exists() or not path.parts:
        return None
    if path.parts[0].endswith(":"):
        typed = Path(*path.parts[2:4])
    elif typed.is_absolute() or typed.parent.exists():
        return None
    return str(typed) if _ID.fullmatch(str(typed)) else None


def no_checkpoint(
    path: Path, holds: Callable[[Path], bool], has_parts: Callable[[Path], bool]
) -> ReshardError:
    """The error for an existing path that is not a checkpoint.

    `holds` tests whether another path is one, and `has_parts` whether it is one that consists of several files.
    """
    whole = next((parent for parent in [*path.absolute().parents][:ABOVE] if has_parts(parent)), None)
    if not whole and (known := foreign.recognized(path)):
        return ReshardError(known)
    children = sorted(path.iterdir()) if path.is_dir() else []
    several = [] if whole else [str(below) for below in _checkpoints_below(path, holds)]
    closed = [child.name for child in children if child.is_dir() and not can_list(child)]
    if whole:
        remedy = f"this is a part of a checkpoint: pass {whole}"
    elif several:
        remedy = f"pass one of the checkpoints below it: {_sorted_names(several)}"
    elif closed:
        remedy = f"if the weights are in {_sorted_names(closed)}, ask its owner for permission to read it"
    else:
        remedy = PASS_WEIGHTS
    return ReshardError(
        Problem(
            NOTHING_FOUND,
            "no checkpoint found here",
            file=str(path),
            expected="one of the formats that `reshard support` lists",
            found=_sorted_names(child.name for child in children) if path.is_dir() else path.name,
            remedy=remedy,
        )
    )


def _checkpoints_below(path: Path, holds: Callable[[Path], bool]) -> Iterator[Path]:
    """The checkpoints below a folder, the nearest first.

    In the Hub's cache they are in `models--Org--Name/snapshots/COMMIT`, for verl in
    `PROJECT/EXPERIMENT/global_step_N/actor`.
    """
    level = [path]
    for _ in range(DEPTH):
        folders = [child for folder in level if folder.is_dir() for child in folders_in(folder)][:BELOW]
        level = []
        for each in folders:
            if holds(each):
                yield each
            else:
                level.append(each)


def no_iteration(path: Path, iteration: Iteration) -> ReshardError:
    """The error for a path without a folder of the requested step."""
    return ReshardError(
        "iteration-folder-missing",
        "the folder of this iteration does not exist",
        file=str(path),
        expected=f"--iteration {iteration}",
        found=_sorted_names(child.name for child in path.iterdir()) if path.is_dir() else path.name,
        remedy="choose an existing one, or remove --iteration for the latest",
    )


def _sorted_names(names: Iterable[str]) -> str:
    return listed(sorted(names), 8) or "an empty folder"
