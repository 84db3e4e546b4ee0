"""The page of a server: its runs, their steps, and the command that loads each."""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from pathlib import Path

from reshard.api.inspection import inspect
from reshard.base.errors import ReshardError
from reshard.pages import served_page
from reshard.serve.repositories import Step, repositories_below


def page_of(paths: tuple[Path, ...], address: str) -> str:
    """The page of a server at an address."""
    shown = sorted(repositories_below(paths).values(), key=lambda each: each.name)
    return served_page(address, shown, _described)


@lru_cache(maxsize=256)
def _described(step: Step) -> dict[str, str]:
    """When a step was saved, and what `inspect` says of it."""
    saved = {"saved": datetime.fromtimestamp(step.when).strftime("%Y-%m-%d %H:%M")} if step.when else {}
    try:
        return {**inspect(step.path).rows(), **saved}
    except (ReshardError, OSError) as error:
        return {"format": str(error).splitlines()[0], **saved}
