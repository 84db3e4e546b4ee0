"""What the history says of a failure, as a finding: the release that added a missing name, removed or moved it."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from packaging.version import InvalidVersion, Version

from reshard.base.suggest import closest
from reshard.diagnosis.askers import imports_itself
from reshard.diagnosis.finding import Finding, Place, Text
from reshard.diagnosis.history.having import having
from reshard.diagnosis.history.known import Known, known_of, table_of
from reshard.diagnosis.history.missing import (
    NAMES,
    QUOTE,
    Kind,
    Missing,
    checkout_of,
    imported_in,
    is_shadowed,
    missing_in,
)
from reshard.diagnosis.history.releases import Bounds
from reshard.diagnosis.history.table import PACKAGES, ROOTS, Table, table, tables
from reshard.diagnosis.history.versions import installed_version
from reshard.diagnosis.kinds import filled_in
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import told
from reshard.diagnosis.upstream import asker
from reshard.diagnosis.words import words


def of_failure(root: Traceback, log: Log) -> Finding | None:
    """The finding of what an exception, or an earlier one in its chain, says is missing; None if nothing is known."""
    failure: Traceback | None = root
    while failure is not None:
        if clash := _clash(failure, log):
            return clash
        for missing in missing_in(failure, log):
            if own := _of_itself(missing, failure):
                return _one_package(missing, own, failure, log)
            known = known_of(missing, failure, log)
            if known and not _is_own_file(missing, failure, log):
                return _finding(known, failure, log)
        failure = failure.before
    return None


def _of_itself(missing: Missing, failure: Traceback) -> Table | None:
    """The table of the package that asks itself for a name: caller and called code are of one release."""
    importer = _package_of(asker(failure))
    own = table(importer) if importer else None
    if own is None or is_shadowed(missing.path):
        return None
    if missing.kind in NAMES:
        return own if missing.root == own.root else None
    return own if missing.kind is Kind.ATTRIBUTE and own.has_class(missing.owner) else None


def _is_own_file(missing: Missing, failure: Traceback, log: Log) -> bool:
    """Whether a checkout lacks a part of its own, so that no release is to blame."""
    folder = checkout_of(missing)
    caller = asker(failure).replace("\\", "/")
    if missing.kind is Kind.MODULE:
        return imports_itself(failure, log)
    return bool(folder) and caller.startswith(f"{folder}/{missing.root}/")


def _finding(known: Known, failure: Traceback, log: Log) -> Finding | None:
    """The finding of what is known of a missing name, compared with the installed release if the log shows it."""
    version = version_of(known.table.package, failure, log)
    if replaced := _of_successor(known, version, failure, log):
        return replaced
    bounds = known.presence.bounds(version)
    if bounds:
        return _of_releases(known, bounds, version, failure, log)
    if not known.presence.there:
        return _of_no_release(known, failure, log)
    is_named = known.missing.kind in (Kind.IMPORT, Kind.MODEL_TYPE)
    if not is_named or not known.presence.is_everywhere or _IS_LOADING.search(failure.said):
        return None
    first = known.table.versions[min(known.presence.there)]
    if version and version >= Version(first):
        return None
    values: dict[str, object] = {"name": known.shown, "package": known.table.package, "first": first}
    return _told("installed-before", values, "likely", known.table, failure, log)


def _of_successor(known: Known, version: Version | None, failure: Traceback, log: Log) -> Finding | None:
    """The finding that an attribute is of a class which another one of the same name replaced."""
    own, missing = known.table, known.missing
    found = own.successor(missing.owner) if missing.kind is Kind.ATTRIBUTE else None
    if found is None:
        return None
    old, new, before, after = found
    first = own.versions[min(after)]
    is_older = version is not None and version < Version(first)
    if is_older or min(known.presence.there) >= min(after) or max(known.presence.there) < max(before):
        return None
    values: dict[str, object] = {"name": missing.name, "kind": missing.owner, "package": own.package}
    values |= {"old": old, "new": new, "since": first, "last": own.versions[max(before)]}
    return _told("class-replaced", values, "likely" if version else "possible", own, failure, log)


_IS_LOADING = re.compile(r"partially initialized|unknown location")
"""A module is not yet executed, or not the package at all: its release does not matter."""


# ------------------------------------------------------------------------------------------ some releases have it


def _of_releases(
    known: Known, bounds: Bounds, version: Version | None, failure: Traceback, log: Log
) -> Finding:
    kind = _kind(bounds, version)
    package = known.table.package
    pin = f"{package}{bounds.specifier}"
    is_oldest = bounds.since == known.table.versions[0]
    values: dict[str, object] = {
        "name": known.shown,
        "package": package,
        "since": words("or-earlier", version=bounds.since) if is_oldest else bounds.shown,
        "last": bounds.last,
        "again": bounds.again or "",
        "version": version or "",
        "pin": pin,
        "yours": _yours(package, version, bounds),
        "instead": _instead(known, failure),
    }
    vague = kind == "api-between" or known.missing.kind is Kind.ATTRIBUTE  # another class may have this name
    certainty = "sure" if version else "possible" if vague else "likely"
    finding = _told(kind, values, certainty, known.table, failure, log)
    folder = checkout_of(known.missing)
    if not folder:
        return finding
    return replace(finding, remedy=words("update-checkout", folder=folder, package=package, pin=pin))


def _kind(bounds: Bounds, version: Version | None) -> str:
    if bounds.since is None:
        return "api-is-gone"
    if bounds.again:
        return "api-returned"
    return "api-came-later" if version or bounds.until is None else "api-between"


def _yours(package: str, version: Version | None, bounds: Bounds) -> Text:
    """What is known of the installed release."""
    if version:
        return words("yours-is", package=package, version=version)
    return words("yours-or-older", first=bounds.first) if bounds.first else words("yours-unknown")


def _instead(known: Known, failure: Traceback) -> Text:
    """What to write, or which package to update, instead of returning to an old release."""
    package, missing = known.table.package, known.missing
    target = f"{missing.owner}:{missing.name}" if missing.kind in NAMES else ""
    is_seen = bool(failure.frames or known.instead)
    importer = _package_of(asker(failure)) if is_seen else _who_dropped(target)
    if importer and importer != package:
        own = table(importer)
        new = own.dropped(target) if own and target else None
        phrase = "update-importer" if failure.frames else "update-if-importer"
        return words(phrase if new else "fits", importer=importer, version=new)
    if known.instead:
        return words("write-instead", new=known.instead)
    return words("go-back-file" if re.match(r"\w+Config\(", str(known.shown)) else "go-back")


def _who_dropped(target: str) -> str | None:
    """The only package that imported `module:name` and no longer does, for a log that does not show the caller."""
    packages = having(ROOTS, target) if target else []
    asking = [own.package for own in tables(packages) if own.dropped(target)]
    return asking[0] if len(asking) == 1 else None


# ------------------------------------------------------------------------------------------ no release has it

OWNERS = ("transformers", "peft", "torch", "accelerate", "datasets")
"""Packages whose names others also export."""
FIRST_READ = Version("0.5")
"""If the oldest known release is at least this one, it was not the package's first."""
NEAR = 0.75
"""Minimum similarity of a suggested name."""


def _of_no_release(known: Known, failure: Traceback, log: Log) -> Finding | None:
    """The finding that no known release has a name, with the most similar one, or the package that has it."""
    missing, own = known.missing, known.table
    values: dict[str, object] = {"name": known.shown, "package": own.package}
    values |= {"first": own.versions[0], "last": own.versions[-1]}
    if missing.kind is Kind.MODEL_TYPE:
        return _told("model-type-of-none", values | {"name": missing.name}, "likely", own, failure, log)
    is_name = missing.kind in NAMES and missing.owner in own.raw["names"]
    if not (is_name or missing.kind is Kind.MODULE) or _IS_LOADING.search(failure.said):
        return None
    values["cure"] = Text.lines(_cures(missing, own, failure))
    return _told("gone-before", values, "possible", own, failure, log)


def _cures(missing: Missing, own: Table, failure: Traceback) -> Iterator[Text]:
    """The name that was meant, if one is alike; what to update; and the releases before the known ones, if any."""
    every = tables(having(dict.fromkeys((*OWNERS, *ROOTS)), missing.name)) if missing.name else iter(())
    others = (each.root for each in every if each.name(each.root, missing.name).there)
    if other := next(others, None):
        yield words("name-of-other", name=missing.name, other=other)
    elif near := closest(missing.name, own.exports(missing.owner), cutoff=NEAR):
        yield words("nearest-name", name=near[0])
    yield _update(failure, own)
    if Version(own.versions[0]) >= FIRST_READ:
        yield words("older-release", pin=f"{own.package}<{own.versions[0]}")


def _update(failure: Traceback, own: Table) -> Text:
    """What to update: the calling package, if the frames show one."""
    found = (match["root"] for frame in failure.frames[::-1] if (match := _SITE.search(frame)))
    asking = next((each for each in found if each != own.root), None)
    return words("update-asker", package=asking.replace("_", "-")) if asking else words("update-both")


# ------------------------------------------------------------------------------------------ it is somebody's own


def _one_package(missing: Missing, own: Table, failure: Traceback, log: Log) -> Finding:
    values: dict[str, object] = {"package": own.package, "frame": asker(failure)}
    values |= {"asked": missing.owner, "name": missing.name}
    return _told("one-package", values, "possible", own, failure, log)


def of_shadow(root: Traceback, log: Log) -> Finding | None:
    """The finding that a folder or file of the same name is imported instead of a package."""
    match = _OF_MODULE.search(root.said)
    folder = _shadow(match["module"], root) if match else None
    if match is None or folder is None:
        return None
    place, shown = Place.of(log.name, root.last, root.said), {"module": match["module"], "folder": folder}
    return told("folder-for-package", [place], shown, certainty="likely")


_OF_MODULE = re.compile(rf"(?:from|module) {QUOTE}(?P<module>\w+){QUOTE}")


def _shadow(module: str, root: Traceback) -> Text | None:
    """What is imported in place of a package: Python tells its path, or the frames show it."""
    own, missing = table_of(module), imported_in(root.said)
    if "unknown location" in root.said:
        return words("folder-without-init", module=module) if own else None
    if "partially initialized" in root.said:
        told_paths = re.findall(r"\(([^()]+)\)", root.said)
        paths = [*told_paths, *(frame.rpartition(" ")[0].rpartition(":")[0] for frame in root.frames)]
        file = re.compile(rf"(?:.*[/\\])?{module}\.py")
        path = next((each for each in paths if file.fullmatch(each) and is_shadowed(each)), None)
        return words("file-of-same-name", module=module, path=path) if path else None
    if own is None or missing is None or not is_shadowed(missing.path):
        return None
    known = own.name(module, missing.name).is_everywhere
    return words("folder-of-path", path=missing.path) if known else None


def _clash(failure: Traceback, log: Log) -> Finding | None:
    """The finding that transformers now has a model type that another package registers again."""
    match = _CLASH.search(failure.said)
    own = table("transformers") if match else None
    there = own.key(match["name"]).there if own and match else ()
    if match is None or own is None or not there or min(there) == 0:
        return None
    packages = (_package_of(frame) for frame in failure.frames[::-1])
    importer = next((each for each in packages if each != "transformers"), None)
    since = own.versions[min(there)]
    values: dict[str, object] = {
        "name": match["name"],
        "since": since,
        "importer": Text(importer, f"{importer} ") if importer else words("another-package"),
        "update": words("update-package", importer=importer) if importer else "",
        "pin": f"transformers<{since}",
    }
    return _told("api-clash", values, "sure" if importer else "likely", own, failure, log)


_CLASH = re.compile(rf"{QUOTE}(?P<name>[\w.-]+){QUOTE} is already used by a Transformers config")


# ------------------------------------------------------------------------------------------ findings


def _told(
    kind: str, values: dict[str, object], certainty: str, own: Table, failure: Traceback, log: Log
) -> Finding:
    place = Place.of(log.name, failure.last, failure.said)
    finding = told(kind, [place], values, certainty=certainty, evidence=[read_from(own)])
    return replace(finding, remedy=filled_in(finding.remedy, failure, log))


def read_from(own: Table) -> Text:
    """The releases from which a table was made, and when."""
    first, last = own.versions[0], own.versions[-1]
    return words("history-read", package=own.package, first=first, last=last, date=own.date)


def version_of(package: str, failure: Traceback, log: Log) -> Version | None:
    """The version in a log, or the one installed here if the failure's files are here."""
    here = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    shown = log.versions.get(package)
    if shown is None and any(frame.startswith(here) for frame in failure.frames):
        shown = installed_version(package)
    with suppress(InvalidVersion):
        return Version(shown) if shown else None
    return None


_SITE = re.compile(r"(?:site|dist)-packages[/\\](?P<root>\w+)[/\\]")


def _package_of(frame: str) -> str | None:
    """The package in the history to which a frame's file belongs."""
    match = _SITE.search(frame)
    return PACKAGES.get(match["root"]) if match else None
