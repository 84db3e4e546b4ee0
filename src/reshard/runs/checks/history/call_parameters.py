"""Whether a release accepts a parameter of a class or function, bases in other packages included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from reshard.runs.checks.history.api_table import PACKAGE_OF_ROOT, ApiTable, table
from reshard.runs.checks.history.release_ranges import Bounds
from reshard.runs.checks.history.versions_in_use import Versions


@dataclass(frozen=True)
class RefusedParameter:
    """A parameter that is not accepted. `bounds` are the releases that accept it, None if none ever did.

    `owner` is the class or function that accepted it: maybe a base of the one that is called.
    """

    table: ApiTable
    bounds: Bounds | None
    renamed: str | None = None
    owner: str = ""


def refused(own: ApiTable, function: str, name: str, versions: Versions) -> RefusedParameter | None:
    """Why a call with this keyword raises a TypeError; None if it does not, or if this is unknown."""
    known = parameters(own, function, versions)
    if known is None or name in known:
        return None
    return of_other_release(own, function, name, versions, known) or RefusedParameter(own, None)


def of_other_release(
    own: ApiTable, function: str, name: str, versions: Versions, known: set[str]
) -> RefusedParameter | None:
    """The releases of a function, or of a base of its class, that accept a parameter that this one does not."""
    for each, target in _with_bases(own, function):
        bounds = each.parameter(target, name).bounds(versions.assumed(each))
        if bounds:
            new = each.renames.get(name) or own.renames.get(name)
            owner = target.removesuffix(".__init__")
            return RefusedParameter(each, bounds, new if new in known else None, owner)
    return None


def parameters(of_package: ApiTable, function: str, versions: Versions) -> set[str] | None:
    """All parameters of a function; None if they are unknown."""
    own = of_package.parameters(function, versions.assumed(of_package))
    bases = [base_of(each) for each in own or () if each[0] == "@"]
    inherited = [parameters(*base, versions) if base else None for base in bases]
    if own is None or None in inherited:
        return None
    return {each for each in own if each[0] != "@"}.union(*filter(None, inherited))


def base_of(marked: str) -> tuple[ApiTable, str] | None:
    """The table and constructor of `@module:Class`."""
    module, _, name = marked[1:].partition(":")
    package = PACKAGE_OF_ROOT.get(module.partition(".")[0])
    base = table(package) if package else None
    return (base, f"{name.rpartition('.')[2]}.__init__") if base else None


def _with_bases(own: ApiTable, function: str) -> Iterator[tuple[ApiTable, str]]:
    """A function, then the constructors of its present and past bases in other packages."""
    yield own, function
    for marked in own.marked(function):
        if base := base_of(marked):
            yield from _with_bases(*base)
