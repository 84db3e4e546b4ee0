"""The page of a server: its runs, their steps, and the command that loads each."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from reshard.api.inspection import inspect
from reshard.base.errors import ReshardError
from reshard.pages import served_page
from reshard.runs.serve.repositories import MAX_LOOKED_AT, Repositories, Repository, StepState

DESCRIBED = ("format", "family", "layout", "weights")
"""Rows of `inspect` that are shown."""


@dataclass(frozen=True)
class ShownStep:
    """A step on the page."""

    name: str
    saved: str
    about: dict[str, str]
    lacks: tuple[str, ...]


@dataclass(frozen=True)
class ShownRepository:
    """A repository on the page. Of `more` steps nothing is known."""

    id: str
    folder: str
    steps: list[ShownStep]
    more: int


def page_of(repositories: Repositories, address: str) -> str:
    """The page of a server at an address."""
    shown = [_shown(each) for each in sorted(repositories.by_name().values(), key=lambda each: each.name)]
    return served_page(address, shown)


def _shown(repository: Repository) -> ShownRepository:
    steps = [_shown_step(state) for state in repository.states()]
    more = max(0, len(repository.steps()) - MAX_LOOKED_AT)
    return ShownRepository(repository.id, str(repository.folder), steps, more)


def _shown_step(state: StepState) -> ShownStep:
    when = state.step.when
    saved = datetime.fromtimestamp(when).strftime("%Y-%m-%d %H:%M") if when else ""
    about = _described(state.step.path, when) if state.checkpoint else {}
    return ShownStep(state.step.name, saved, about, state.lacks)


@lru_cache(maxsize=256)
def _described(path: Path, when: float) -> dict[str, str]:
    """What `inspect` says of a checkpoint that was last changed at a time."""
    try:
        rows = inspect(path).rows()
    except (ReshardError, OSError) as error:
        return {"format": str(error).splitlines()[0]}
    return {name: rows[name] for name in DESCRIBED if name in rows}
