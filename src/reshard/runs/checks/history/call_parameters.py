"""Whether a release accepts a parameter of a class or function, bases in other packages included; how it spells one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from packaging.version import InvalidVersion, Version

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


def refused(found: ApiTable, function: str, name: str, versions: Versions) -> RefusedParameter | None:
    """Why a call with this keyword raises a TypeError; None if it does not, or if this is unknown."""
    known = parameters(found, function, versions)
    if known is None or name in known:
        return None
    return of_other_release(found, function, name, versions, known) or RefusedParameter(found, None)


def of_other_release(
    found: ApiTable, function: str, name: str, versions: Versions, known: set[str]
) -> RefusedParameter | None:
    """The releases of a function, or of a base of its class, that accept a parameter that this one does not."""
    for each, target in _with_bases(found, function):
        bounds = each.parameter(target, name).bounds(versions.assumed(each))
        if bounds:
            new = each.renames.get(name) or found.renames.get(name)
            owner = target.removesuffix(".__init__")
            return RefusedParameter(each, bounds, new if new in known else None, owner)
    return None


def parameters(found: ApiTable, function: str, versions: Versions) -> set[str] | None:
    """All parameters of a function; None if they are unknown."""
    own = found.parameters(function, versions.assumed(found))
    bases = [base_of(each) for each in own or () if each[0] == "@"]
    inherited = [parameters(*base, versions) if base else None for base in bases]
    if own is None or None in inherited:
        return None
    return {each for each in own if each[0] != "@"}.union(*filter(None, inherited))


def base_of(marked: str) -> tuple[ApiTable, str] | None:
    """The table and constructor of `@module:Class`."""
    module, _, name = marked[1:].partition(":")
    package = PACKAGE_OF_ROOT.get(module.partition(".")[0])
    found = table(package) if package else None
    return (found, f"{name.rpartition('.')[2]}.__init__") if found else None


def _with_bases(found: ApiTable, function: str) -> Iterator[tuple[ApiTable, str]]:
    """A function, then the constructors of its present and past bases in other packages."""
    yield found, function
    for marked in found.marked(function):
        if base := base_of(marked):
            yield from _with_bases(*base)


def spelling_of(parameter: str, versions: Mapping[str, str], package: str = "transformers") -> str:
    """A parameter as the release of a package in use spells it, given its old or its new name.

    It is returned as it is if the version of the package is unknown, or if the package never renamed it.

    >>> spelling_of("dtype", {"transformers": "4.55.2"}), spelling_of("dtype", {"transformers": "5.0.0"})
    ('torch_dtype', 'dtype')
    """
    found = table(package) if package in versions else None
    with suppress(InvalidVersion):
        version = Version(versions.get(package, ""))
        pairs = found.renames.items() if found else ()
        for old, new in (pair for pair in pairs if parameter in pair):
            first = _first_with(package, old, new)
            if first:
                return new if version >= first else old
    return parameter


@cache
def _first_with(package: str, old: str, new: str) -> Version | None:
    """The first release in which a function that took the old parameter takes the new one."""
    own = table(package)
    if own is None:
        return None
    both = [function for function in own.raw["functions"] if own.own_parameter(function, old).there]
    firsts = [min(there) for function in both if (there := own.own_parameter(function, new).there)]
    return Version(own.versions[min(firsts)]) if firsts and min(firsts) > 0 else None
