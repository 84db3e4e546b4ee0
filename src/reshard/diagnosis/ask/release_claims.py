"""Claims about releases of packages: when a name was added or removed, whether it exists, and what a call accepts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress

from packaging.version import InvalidVersion, Version

from reshard.diagnosis.ask.expressions import expressions
from reshard.diagnosis.history.api_table import PACKAGE_OF_ROOT, PACKAGE_ROOTS, ApiTable, table
from reshard.diagnosis.history.bloom_filters import packages_with
from reshard.diagnosis.history.call_parameters import refused
from reshard.diagnosis.history.release_ranges import Presence
from reshard.diagnosis.history.versions_in_use import Versions

_ALIASES = {"pytorch": "torch", **PACKAGE_OF_ROOT, **{each.replace("-", "_"): each for each in PACKAGE_ROOTS}}
_KINDS = ("lacks", "removed", "added", "has")


class ReleaseClaims:
    """What the tables say of a statement; `versions` are those in use, by package, and `sent` what a model was told."""

    def __init__(self, versions: Mapping[str, str], sent: str) -> None:
        self._sent = sent
        self._pinned: dict[str, tuple[Version, str]] = {}
        for package, version in versions.items():
            with suppress(InvalidVersion):
                self._pinned[package] = Version(version), ""

    def is_false(self, statement: str) -> bool:
        """Whether a statement contradicts the tables, or the versions in use."""
        given = expressions("claims")
        for match in (match for pattern in given["history"] for match in pattern.finditer(statement)):
            if self._is_wrong_history(match, statement):
                return True
        if any(map(self._is_wrong_version, given["installed"].finditer(statement))):
            return True
        if given["rejects"].search(statement):
            return False
        calls, imports = given["call"].findall(statement), given["import"].findall(statement)
        return any(self._is_refused(path, inside, statement) for path, inside in calls) or any(
            self._is_absent(found[0] or found[2][:-1], found[1] or found[3], statement) for found in imports
        )

    def _is_wrong_version(self, match: re.Match[str]) -> bool:
        used = self._pinned.get(_package(match))
        return used is not None and not f"{used[0]}.".startswith(f"{match['version']}.")

    def _is_wrong_history(self, match: re.Match[str], statement: str) -> bool:
        found = table(_package(match))
        presence = _presence(found, match["name"], statement) if found else None
        kind = next(kind for kind in _KINDS if match[kind])
        if presence is None or (kind in ("removed", "lacks") and _may_go_on(found, match["name"], presence)):
            return False
        return _holds(kind, presence, match["version"]) is False

    def _is_refused(self, path: str, inside: str, statement: str) -> bool:
        """Whether no package with such a function or class accepts one of these arguments."""
        root, _, name = path.rpartition(".")
        target = f"{name}.__init__" if name[:1].isupper() else name
        package = PACKAGE_OF_ROOT.get(root.partition(".")[0])
        names = [package] if package else packages_with(PACKAGE_ROOTS, name)
        names = [each for each in names if each in _named(statement)] or names
        tables = [each for each in map(table, names) if each and target in each.raw["functions"]]
        if not package:  # a name that many have: the one that all import
            tables = [each for each in tables if each.name(PACKAGE_ROOTS[each.package], name).there]
        keywords = [
            each
            for each in re.findall(r"(?<!\w)(\w{1,80})\s{0,4}=(?!=)", inside)
            if not self._is_quoted(each, statement)
        ]
        return bool(tables) and any(
            all(self._refuses(each, target, keyword, statement) for each in tables) for keyword in keywords
        )

    def _refuses(self, found: ApiTable, target: str, keyword: str, statement: str) -> bool:
        versions = Versions({**self._pinned, **_named(statement)}, {})
        result = refused(found, target, keyword, versions)
        return result is not None and (result.bounds is None or found.package in versions.pinned)

    def _is_quoted(self, name: str, statement: str) -> bool:
        """Whether a statement only tells what was sent, and advises nothing."""
        return name.lower() in self._sent and not expressions("claims")["advises"].search(statement)

    def _is_absent(self, module: str, name: str, statement: str) -> bool:
        """Whether the version in use has a module, but not this name in it."""
        found = table(PACKAGE_OF_ROOT.get(module.partition(".")[0], ""))
        if not found or self._is_quoted(name, statement):
            return False
        version = Versions({**self._pinned, **_named(statement)}, {}).assumed(found)
        return found.name(module, name).at(version) is False and not found.is_open(module, version)


def _package(match: re.Match[str]) -> str:
    name = match["package"].lower()
    return _ALIASES.get(name, name)


def _named(statement: str) -> dict[str, tuple[Version, str]]:
    """The releases that a statement names, such as those to install."""
    matches = expressions("claims")["release"].finditer(statement)
    return {_package(match): (Version(match["version"]), "") for match in matches}


def _presence(found: ApiTable, name: str, statement: str) -> Presence | None:
    """When a name existed: in a module, as a class or its attribute, or as an argument of a class in the statement."""
    module, _, last = name.rpartition(".")
    root = PACKAGE_ROOTS[found.package]
    if module in found.modules or not module:
        presence = found.name(module or root, last)
        if presence.there or (module and not found.is_open(module, Version(found.versions[-1]))):
            return presence
    owner = module.rpartition(".")[2]
    owners = [owner] if owner else re.findall(r"\b[A-Z]\w*[a-z]\w*\b", statement)
    for each in owners:
        for presence in (found.attribute(each, last), found.own_parameter(f"{each}.__init__", last)):
            if presence.there:
                return presence
    return None


def _may_go_on(found: ApiTable | None, name: str, presence: Presence) -> bool:
    """Whether a name that a module had may still be there: its names cannot be listed any more."""
    if found is None:
        return False
    module, _, last = name.rpartition(".")
    module = module or PACKAGE_ROOTS[found.package]
    after = found.after(max(presence.there))
    is_name = presence == found.name(module, last)
    return is_name and after is not None and found.is_open(module, Version(after))


def _holds(kind: str, presence: Presence, version: str) -> bool | None:
    """Whether something was added, removed, there or not in a release, such as 4.46; None if nothing shows it."""
    releases = presence.releases.versions
    at = [index for index, each in enumerate(releases) if f"{each}.".startswith(f"{version}.")]
    if not at:
        before, _ = presence.releases.place(Version(version))
        at = [before + 1]
    if not 0 <= at[0] <= presence.releases.last:
        return None
    has, lacks = any(each in presence.there for each in at), any(each not in presence.there for each in at)
    earlier = at[0] - 1 in presence.there if at[0] else None
    if kind in ("has", "lacks"):
        return has if kind == "has" else lacks
    if kind == "added":
        return has and (None if earlier is None else not earlier)
    return lacks and earlier
