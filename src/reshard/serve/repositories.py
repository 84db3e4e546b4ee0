"""The repositories of a server: each checkpoint below its folders is one, and the steps of a run are its revisions."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from reshard.base.errors import ReshardError
from reshard.final.saved_checkpoints import (
    MAX_DEPTH,
    OWN_FORMAT,
    FoundCheckpoint,
    checkpoint_at,
    step_of,
    steps_in,
)
from reshard.folders.iterations import TRACKER, choose, iterations_in, name_of
from reshard.formats import detect
from reshard.stores import StorePath

# The first part of all names: `my-run` alone, or `runs/my-run`, would be a folder for a client beside it.
OWNER = "local"
MAIN = "main"
# The revision of weights that lie in the folder of a run itself.
FINAL = "final"
# Names of folders for the steps of a run, which say nothing of it.
INNER_FOLDERS = {"checkpoint", "checkpoints", "ckpt", "ckpts", "weights"}
# Seconds for which a listing of folders is used again.
SEEN_SECONDS = 1.0
# Seconds after which a step is not being written any more, though the file that is written last is missing.
SETTLED_SECONDS = 60.0
# Steps that are opened to find out whether they are complete.
MAX_LOOKED_AT = 12


class Step(NamedTuple):
    """A step of a run: the name of its revision, its path, and when it was last changed, in Unix seconds."""

    name: str
    path: Path
    when: float


class NotServedError(Exception):
    """What a client asked for is not here. `code` is the Hub's, for its client."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Repository:
    """A checkpoint, or a run with its steps. `name` has no owner."""

    name: str
    folder: Path

    @property
    def id(self) -> str:
        """Its name for a client of the Hub."""
        return f"{OWNER}/{self.name}"

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Its steps, the latest first."""
        top = self.folder
        if isinstance(top, StorePath):
            steps = [Step(name_of(number), path, 0.0) for number, path in iterations_in(top).items()][::-1]
        else:
            steps = [Step(FINAL if path == top else path.name, path, when) for when, path in steps_in(top)]
        return tuple(steps) or (Step(FINAL, top, 0.0),)

    @property
    def latest(self) -> tuple[Step, ...]:
        """The steps that are opened to find out whether they are complete, the latest first."""
        return self.steps[:MAX_LOOKED_AT]

    def complete(self) -> Iterator[Step]:
        """The latest steps that lack nothing."""
        return (step for step in self.latest if not self.lacks(step))

    def lacks(self, step: Step) -> str:
        """Why a step cannot be `main`; empty if all weights are there, and finite."""
        found = _looked_at(step, self.folder, _now())
        if isinstance(found, str):
            return found
        return ", ".join(found.lacks) if found.diverged else ""

    def checkpoint(self, step: Step) -> FoundCheckpoint:
        """The checkpoint of a step. Raises NotServedError if it is not complete."""
        found = _looked_at(step, self.folder, _now())
        if isinstance(found, str):
            raise NotServedError("RevisionNotFound", f"{step.name} of {self.id} is not complete: {found}")
        return found

    def at(self, revision: str) -> Step:
        """The step of a revision: its name, its number, or "main", the latest complete one. Raises NotServedError."""
        named = (step for step in self.steps if revision in (step.name, str(step_of(step.path))))
        if step := next(self.complete() if revision == MAIN else named, None):
            return step
        told = [MAIN, *(step.name for step in self.latest)]
        if revision == MAIN:
            told = [f"{step.name}: {self.lacks(step)}" for step in self.latest]
        raise NotServedError("RevisionNotFound", f"{self.id} has no {revision!r}; it has {', '.join(told)}")


def repositories_below(paths: tuple[Path, ...]) -> dict[str, Repository]:
    """The repositories at or below some paths, by name."""
    return _repositories(paths, _now())


def repository_named(paths: tuple[Path, ...], owner: str, name: str) -> Repository:
    """One of them. Raises NotServedError."""
    repositories = repositories_below(paths)
    if owner != OWNER or name not in repositories:
        names = ", ".join(each.id for each in repositories.values()) or "no checkpoint"
        raise NotServedError("RepoNotFound", f"{owner}/{name} is not here; this server has {names}")
    return repositories[name]


def _now() -> int:
    """A number that changes when folders are to be looked at again."""
    return int(time.monotonic() / SEEN_SECONDS)


@lru_cache(maxsize=16)
def _repositories(paths: tuple[Path, ...], now: int) -> dict[str, Repository]:
    found: dict[str, Repository] = {}
    for top in paths:
        for run in _runs_below(top):
            name = _name(run, top)
            numbered = (f"{name}-{number}" for number in count(2))
            free = next(each for each in chain([name], numbered) if each not in found)
            found[free] = Repository(free, run)
    return found


@lru_cache(maxsize=4096)
def _looked_at(step: Step, folder: Path, now: int) -> FoundCheckpoint | str:
    """The checkpoint of a step, or why it is none. What is complete stays so until its files change."""
    try:
        return _checkpoint_of(step, folder)
    except NotServedError as error:
        return str(error)


@lru_cache(maxsize=4096)
def _checkpoint_of(step: Step, folder: Path) -> FoundCheckpoint:
    is_remote = isinstance(step.path, StorePath)
    is_settled = time.time() - step.when > SETTLED_SECONDS
    found: FoundCheckpoint | list[str]
    if is_remote:
        found = _unfinished(step, folder)
    else:
        found = checkpoint_at(step.when, step.path, folder, alone=is_settled)
    if isinstance(found, FoundCheckpoint) and found.format != OWN_FORMAT:
        return found
    reasons = found if isinstance(found, list) else ["only the script that saved it can read it"]
    # The weights of a folder that is no step may be in a folder below.
    if not reasons and (is_remote or step.path == folder) and (format := detect(step.path)):
        return FoundCheckpoint(step.path, None, format, step.when)
    raise NotServedError("RevisionNotFound", ", ".join(reasons) or "it is no checkpoint that reshard reads")


def _unfinished(step: Step, run: Path) -> list[str]:
    """Why a step of a run in a store is not complete: the tracker names an earlier one."""
    number = step_of(step.path)
    with suppress(ReshardError):  # without a tracker, somebody has copied steps alone
        _, tracked = choose(run)
        if number is not None and isinstance(tracked, int) and tracked < number:
            return [f"{TRACKER} names step {tracked}: this one was not finished"]
    return []


def _runs_below(top: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """The checkpoints and runs at or below a path; not those inside of one."""
    if isinstance(top, StorePath) or _is_run(top):
        yield top
        return
    entries: list[Path] = []
    with suppress(OSError):
        entries = sorted(each for each in top.iterdir() if not each.name.startswith("."))
    folders = [each for each in entries if each.is_dir() and not each.is_symlink()]
    if any(each.name.lower() in INNER_FOLDERS and _is_run(each) for each in folders):
        yield top  # its config may be beside the folder of its steps
        return
    for folder in folders if depth else ():
        yield from _runs_below(folder, depth - 1)


def _is_run(folder: Path) -> bool:
    """Whether a folder has weights, or steps. A file is one if it was named."""
    with suppress(OSError, ReshardError):
        return (
            folder.is_file()
            or any(step_of(entry) is not None for entry in folder.iterdir())
            or detect(folder) is not None
        )
    return False


def _name(run: Path, top: Path) -> str:
    """A name that the Hub allows, from the path of a run below `top`."""
    parts = run.relative_to(top).parts or (run.name or run.absolute().name,)
    kept = [part for part in parts if part.lower() not in INNER_FOLDERS] or parts
    name = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(kept))
    return re.sub(r"\.\.+", ".", name).strip("-.")[:90].rstrip("-.") or "checkpoint"
