"""The repositories of a server: each checkpoint below its folders is one, and the steps of a run are its revisions."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
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
MAX_LOOKED_AT = 12
"""Steps that are opened to find out whether they are complete; the latest come first."""


class Step(NamedTuple):
    """A step of a run: the name of its revision, its path, and when it was last changed, in Unix seconds."""

    name: str
    path: Path
    when: float

    @property
    def number(self) -> int | None:
        """The number of the step, if its name has one."""
        return step_of(self.path)


class StepState(NamedTuple):
    """What a step is: a checkpoint, or why it is none."""

    step: Step
    checkpoint: FoundCheckpoint | None
    lacks: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether it can be served: all weights are there, and finite."""
        return self.checkpoint is not None and not self.checkpoint.diverged


class NotServedError(Exception):
    """What a client asked for is not here. `code` is the Hub's, for its client."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Repository:
    """A checkpoint, or a run with its steps. `name` has no owner."""

    name: str
    folder: Path

    def __post_init__(self) -> None:
        self._states: dict[Step, StepState] = {}
        self._listed = Remembered(self._list_steps)

    @property
    def id(self) -> str:
        """Its name for a client of the Hub."""
        return f"{OWNER}/{self.name}"

    def steps(self) -> list[Step]:
        """Its steps, the latest first."""
        return self._listed()

    def _list_steps(self) -> list[Step]:
        if isinstance(self.folder, StorePath):
            found = [Step(name_of(number), path, 0.0) for number, path in iterations_in(self.folder).items()]
            return found[::-1] or [Step(FINAL, self.folder, 0.0)]
        steps = [
            Step(FINAL if path == self.folder else path.name, path, when)
            for when, path in steps_in(self.folder)
        ]
        self._states = {step: state for step, state in self._states.items() if step in steps}
        return steps or [Step(FINAL, self.folder, 0.0)]

    def state(self, step: Step) -> StepState:
        """Whether a step is complete. What was complete stays so until its files change."""
        known = self._states.get(step)
        if known is None or not known.is_complete:
            known = self._states[step] = self._look_at(step)
        return known

    def _look_at(self, step: Step) -> StepState:
        in_store = isinstance(step.path, StorePath)
        found = [] if in_store else checkpoint_at(step.when, step.path, self.folder)
        if not found and len(self.steps()) == 1 and (format := detect(step.path)):
            found = FoundCheckpoint(step.path, None, format, step.when)  # of a folder above it
        if not isinstance(found, FoundCheckpoint):
            return StepState(step, None, tuple(found) or ("it is no checkpoint that reshard reads",))
        if found.format == OWN_FORMAT:
            return StepState(step, None, ("only the script that saved it can read it",))
        return StepState(step, found, found.lacks if found.diverged else ())

    def states(self) -> Iterator[StepState]:
        """The states of the latest steps."""
        return map(self.state, self.steps()[:MAX_LOOKED_AT])

    def at(self, revision: str) -> Step:
        """The step of a revision: its name, its number, or "main". Raises NotServedError."""
        if revision == MAIN:
            return self._newest()
        steps = self.steps()
        for step in steps:
            if revision in (step.name, str(step.number)):
                return step
        names = ", ".join([MAIN, *(step.name for step in steps[:MAX_LOOKED_AT])])
        raise NotServedError("RevisionNotFound", f"{self.id} has no step {revision!r}; it has {names}")

    def _newest(self) -> Step:
        """The latest complete step."""
        for state in self.states():
            if state.is_complete:
                return state.step
        reasons = "; ".join(self.why_not(step) for step in self.steps()[:MAX_LOOKED_AT])
        raise NotServedError("RevisionNotFound", f"{self.id} has no complete step: {reasons}")

    def why_not(self, step: Step) -> str:
        """Why a step cannot be served."""
        return f"{step.name} is not complete: {', '.join(self.state(step).lacks)}"


class Remembered:
    """The result of a function without arguments, computed again after `SEEN_SECONDS`."""

    def __init__(self, look: Callable[[], list[Step]]) -> None:
        self._look, self._result, self._until = look, list[Step](), 0.0

    def __call__(self) -> list[Step]:
        if time.monotonic() >= self._until:
            self._result = self._look()
            self._until = time.monotonic() + SEEN_SECONDS
        return self._result


class Repositories:
    """All repositories below some paths."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._known: dict[Path, Repository] = {}
        self._until = 0.0

    def by_name(self) -> dict[str, Repository]:
        """The repositories by name. A folder keeps its name as long as it is there."""
        if time.monotonic() >= self._until:
            found = {run: top for top in self._paths for run in _runs_below(top)}
            self._known = {run: each for run, each in self._known.items() if run in found}
            for run, top in found.items():
                if run not in self._known:
                    self._known[run] = Repository(self._free(_name(run, top)), run)
            self._until = time.monotonic() + SEEN_SECONDS
        return {each.name: each for each in self._known.values()}

    def named(self, owner: str, name: str) -> Repository:
        """A repository. Raises NotServedError."""
        repositories = self.by_name()
        if owner != OWNER or name not in repositories:
            names = ", ".join(each.id for each in repositories.values()) or "no checkpoint"
            raise NotServedError("RepoNotFound", f"{owner}/{name} is not here; this server has {names}")
        return repositories[name]

    def _free(self, name: str) -> str:
        taken = {each.name for each in self._known.values()}
        return next(
            each for number in count(1) if (each := f"{name}-{number}" if number > 1 else name) not in taken
        )


def _runs_below(top: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """The checkpoints and runs at or below a path; not those inside of one."""
    if isinstance(top, StorePath) or _is_run(top):
        yield top
    elif depth and top.is_dir():
        with suppress(OSError):
            for entry in sorted(top.iterdir()):
                if not entry.is_symlink() and not entry.name.startswith(".") and entry.is_dir():
                    yield from _runs_below(entry, depth - 1)


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
