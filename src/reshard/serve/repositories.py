"""The repositories of a server: each checkpoint below its folders is one, and the steps of a run are its revisions."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
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
from reshard.folders.iterations import iterations_in, name_of
from reshard.formats import detect
from reshard.stores import StorePath

OWNER = "local"
"""The first part of all names: `my-run` alone, or `runs/my-run`, would be a folder for a client beside it."""
MAIN = "main"
FINAL = "final"
"""The revision of weights that lie in the folder of a run itself."""
INNER_FOLDERS = {"checkpoint", "checkpoints", "ckpt", "ckpts", "weights"}
"""Names of folders for the steps of a run, which say nothing of it."""
SEEN_SECONDS = 1.0
"""Seconds for which a listing of folders is used again."""
SETTLED_SECONDS = 60.0
"""Seconds after which a step is not being written any more, though no file names the last one."""
MAX_LOOKED_AT = 12
"""Steps that are opened to find out whether they are complete; the latest come first."""


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


class StepState(NamedTuple):
    """What a step is: a checkpoint, or what it lacks to be one."""

    step: Step
    checkpoint: FoundCheckpoint | None
    lacks: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether all weights are there, and finite."""
        return not self.lacks


@dataclass(frozen=True)
class Repository:
    """A checkpoint, or a run with its steps. `name` has no owner."""

    name: str
    folder: Path

    @property
    def id(self) -> str:
        """Its name for a client of the Hub."""
        return f"{OWNER}/{self.name}"

    def steps(self) -> tuple[Step, ...]:
        """Its steps, the latest first."""
        return _steps_in(self.folder, _now())

    def states(self) -> Iterator[StepState]:
        """The states of the latest steps, the latest first."""
        return (_state_of(step, self.folder, _now()) for step in self.steps()[:MAX_LOOKED_AT])

    def checkpoint(self, step: Step) -> FoundCheckpoint:
        """The checkpoint of a step. Raises NotServedError if it is not complete."""
        state = _state_of(step, self.folder, _now())
        if state.checkpoint is None:
            raise NotServedError(
                "RevisionNotFound", f"{step.name} of {self.id} is not complete: {state.lacks}"
            )
        return state.checkpoint

    def at(self, revision: str) -> Step:
        """The step of a revision: its name, its number, or "main", the latest complete one. Raises NotServedError."""
        if revision == MAIN:
            return self._latest()
        steps = self.steps()
        for step in steps:
            if revision in (step.name, str(step_of(step.path))):
                return step
        names = ", ".join([MAIN, *(step.name for step in steps[:MAX_LOOKED_AT])])
        raise NotServedError("RevisionNotFound", f"{self.id} has no step {revision!r}; it has {names}")

    def _latest(self) -> Step:
        states = list(self.states())
        for state in states:
            if state.is_complete:
                return state.step
        reasons = "; ".join(f"{state.step.name}: {state.lacks}" for state in states)
        raise NotServedError("RevisionNotFound", f"{self.id} has no complete step: {reasons}")


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


@lru_cache(maxsize=1024)
def _steps_in(folder: Path, now: int) -> tuple[Step, ...]:
    if isinstance(folder, StorePath):
        steps = [Step(name_of(number), path, 0.0) for number, path in iterations_in(folder).items()][::-1]
    else:
        steps = [Step(FINAL if path == folder else path.name, path, when) for when, path in steps_in(folder)]
    return tuple(steps) or (Step(FINAL, folder, 0.0),)


@lru_cache(maxsize=4096)
def _state_of(step: Step, folder: Path, now: int) -> StepState:
    try:
        checkpoint = _checkpoint_of(step, folder)
    except NotServedError as error:
        return StepState(step, None, str(error))
    return StepState(step, checkpoint, ", ".join(checkpoint.lacks) if checkpoint.diverged else "")


@lru_cache(maxsize=4096)
def _checkpoint_of(step: Step, folder: Path) -> FoundCheckpoint:
    """The checkpoint of a step. What is complete stays so until its files change; what is not raises NotServedError."""
    is_settled = time.time() - step.when > SETTLED_SECONDS
    in_store = isinstance(step.path, StorePath)
    found = [] if in_store else checkpoint_at(step.when, step.path, folder, alone=is_settled)
    if isinstance(found, FoundCheckpoint) and found.format != OWN_FORMAT:
        return found
    is_only = step.path == folder and not isinstance(found, FoundCheckpoint)
    if not found and is_only and (format := detect(folder)):
        return FoundCheckpoint(folder, None, format, step.when)  # its weights are in a folder below
    reasons = [*found] if isinstance(found, list) else ["only the script that saved it can read it"]
    raise NotServedError("RevisionNotFound", ", ".join(reasons) or "it is no checkpoint that reshard reads")


def _runs_below(top: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """The checkpoints and runs at or below a path; not those inside of one."""
    if isinstance(top, StorePath) or _is_run(top):
        yield top
        return
    entries: list[Path] = []
    with suppress(OSError):
        entries = sorted(top.iterdir())
    folders = [
        entry
        for entry in entries
        if not entry.is_symlink() and not entry.name.startswith(".") and entry.is_dir()
    ]
    if any(folder.name.lower() in INNER_FOLDERS and _is_run(folder) for folder in folders):
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
    return re.sub(r"\.\.+", ".", name).strip("-.")[:90] or "checkpoint"
