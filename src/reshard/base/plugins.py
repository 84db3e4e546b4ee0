"""Families and formats that other installed packages provide, through entry points.

[project.entry-points."reshard.formats"]
mine = "my_package:FORMAT"
"""

from __future__ import annotations

import sys
import warnings
from collections import UserDict
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import cache, cached_property
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.base.errors import Problem, type_and_message

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class PluginWarning(UserWarning):
    """A plugin was skipped; `problem` says which one and why."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def leave_out(code: str, what: str, found: str, remedy: str, rule: str | None = None) -> None:
    """Warn that a plugin is skipped."""
    problem = Problem(code, what, rule=rule, found=found, remedy=remedy, severity="warning")
    warnings.warn(PluginWarning(problem), stacklevel=2)


class Registry(UserDict[str, T]):
    """Declarations by name: those of plugins first, then reshard's `own`.

    Both are imported on first access, so that plugins can import what they need of reshard. `names` returns all names
    that a declaration uses. A plugin that cannot be loaded, has the wrong type, or uses a name that is taken is skipped
    with a warning.
    """

    def __init__(
        self,
        group: str,
        kind: type[T],
        own: Callable[[], Iterable[T]],
        names: Callable[[T], Collection[str]] = lambda each: (_name(each),),
    ) -> None:
        self._group, self._kind, self._own, self._names = group, kind, own, names

    @property
    def is_as_shipped(self) -> bool:
        """Whether there are no plugins, and `own` has not been loaded."""
        return "data" not in vars(self) and not _entry_points(self._group)

    @cached_property
    def data(self) -> dict[str, T]:  # type: ignore[override]
        """All declarations."""
        own = {_name(each): each for each in self._own()}
        taken = {name: "reshard" for each in own.values() for name in self._names(each)}
        objects: dict[str, T] = {}
        for entry in sorted(_entry_points(self._group), key=lambda entry: (_package(entry), entry.name)):
            brought = self._loaded(entry)
            if brought is None or not self._is_free(brought, entry, taken):
                continue
            objects[_name(brought)] = brought
            taken |= dict.fromkeys(self._names(brought), _package(entry))
        return {**objects, **own}

    def _loaded(self, entry: EntryPoint) -> T | None:
        what = f"a {self._kind.__name__.lower()} of another package cannot be used: {_package(entry)}"
        try:
            brought: Any = entry.load()
        except Exception as error:
            leave_out(
                "plugin-broken",
                what,
                type_and_message(error),
                "install a version of it that works with this reshard, or uninstall it",
            )
            return None
        if isinstance(brought, self._kind):
            return brought
        leave_out(
            "plugin-of-another-kind",
            what,
            f"{entry.value} is a {type(brought).__name__}",
            "report it to its authors, or uninstall it",
            f"an entry point of {self._group} names a {self._kind.__name__}",
        )
        return None

    def _is_free(self, brought: T, entry: EntryPoint, taken: dict[str, str]) -> bool:
        clashing = [name for name in self._names(brought) if name in taken]
        if clashing:
            leave_out(
                "plugin-name-taken",
                f"a {self._kind.__name__.lower()} of another package has the name of an existing one",
                f"{', '.join(clashing)} in {_package(entry)}, and in {taken[clashing[0]]}",
                f"the one of {taken[clashing[0]]} is used; uninstall the package that you do not need",
            )
        return not clashing


def _name(each: Any) -> str:
    return str(each.name)


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value


def _entry_points(group: str) -> Collection[EntryPoint]:
    if not _is_named():
        return ()
    from importlib.metadata import entry_points  # imports half of the standard library

    return entry_points(group=group)


@cache
def _is_named() -> bool:
    """Whether any installed package may have entry points for reshard.

    Parsing all metadata would take ten times as long.
    """
    if any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path):
        return True
    for folder in map(Path, sys.path):
        if folder.is_file():  # an archive
            return True
        with suppress(OSError):
            if any(map(_names_us, folder.iterdir())):
                return True
    return False


def _names_us(info: Path) -> bool:
    if not info.name.endswith(("-info", "-INFO")):
        return False
    try:
        return b"[reshard." in (info / "entry_points.txt").read_bytes()
    except OSError:  # most packages have no such file
        return False
