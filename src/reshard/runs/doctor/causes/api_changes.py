"""What the history says of a failure, as a finding: the release that added a missing name, removed or moved it."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from packaging.version import InvalidVersion, Version

from reshard.base.languages import Text
from reshard.base.suggest import closest
from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.history.api_table import PACKAGE_OF_ROOT, PACKAGE_ROOTS, ApiTable, table, tables
from reshard.runs.checks.history.bloom_filters import packages_with
from reshard.runs.checks.history.release_ranges import Bounds
from reshard.runs.checks.history.versions_in_use import installed_version, read_from
from reshard.runs.checks.location import Location
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.causes.import_errors import imports_itself
from reshard.runs.doctor.causes.known_names import KnownName, known_of
from reshard.runs.doctor.causes.missing_names import (
    NAME_KINDS,
    Missing,
    MissingKind,
    checkout_of,
    is_shadowed,
    missing_in,
)
from reshard.runs.doctor.frame_packages import asker, update_of
from reshard.runs.doctor.text.log import Log, Traceback


@dataclass(frozen=True)
class ApiRule:
    """A rule that applies, the table that says so, how certain it is at most, and the values of its texts."""

    rule: str
    own: ApiTable
    certainty: str
    values: Mapping[str, object]
    remedy: Text | None = None
    """What to do in place of what the rule says."""


def of_failure(root: Traceback, log: Log) -> Finding | None:
    """The finding of what an exception, or an earlier one in its chain, says is missing; None if nothing is known."""
    failure: Traceback | None = root
    while failure is not None:
        if answer := _answer(failure, log):
            place = Location.of(log.name, failure.last, failure.error_text)
            proof = [read_from(answer.own)]
            finding = rules.finding(
                answer.rule, [place], answer.values, certainty=answer.certainty, evidence=proof
            )
            return replace(finding, remedy=answer.remedy or finding.remedy)
        failure = failure.before
    return None


def _answer(failure: Traceback, log: Log) -> ApiRule | None:
    for missing in missing_in(failure, log):
        known = known_of(missing, failure, log)
        if known and not _is_of_asker(known, failure, log):
            return _of_known(known, failure, version_of(known.table.package, failure, log))
        if itself := _of_itself(missing, failure):
            return itself
    return None


def _is_of_asker(known: KnownName, failure: Traceback, log: Log) -> bool:
    """Whether a package, or a checkout of it, asks for what is its own: one release knows its own names."""
    missing, frame = known.missing, asker(failure)
    if missing.kind is MissingKind.MODULE:
        return imports_itself(failure, log)
    folder = checkout_of(missing)
    is_inside = bool(folder) and frame.replace("\\", "/").startswith(f"{folder}/{missing.root}/")
    is_asked = missing.kind in (*NAME_KINDS, MissingKind.ATTRIBUTE)
    return is_asked and (is_inside or known.table.package == _package_of(frame))


def _of_itself(missing: Missing, failure: Traceback) -> ApiRule | None:
    """A package asks for a name of its own: that its release lacks it is a bug, or its files are of several."""
    importer = _package_of(asker(failure))
    own = table(importer) if importer else None
    if own is None or is_shadowed(missing.path):
        return None
    is_of_module = missing.kind in NAME_KINDS and missing.root == own.root
    is_of_class = missing.kind is MissingKind.ATTRIBUTE and own.has_class(missing.owner)
    values = {"package": own.package, "asked": missing.owner, "name": missing.name, "frame": asker(failure)}
    return ApiRule("one-package", own, "possible", values) if is_of_module or is_of_class else None


def _of_known(known: KnownName, failure: Traceback, version: Version | None) -> ApiRule | None:
    """What is known of a missing name, compared with the installed release if the log shows it."""
    if replaced := _of_replaced(known, version):
        return replaced
    if bounds := known.bounds(version):
        return _of_releases(known, bounds, version, failure)
    if _IS_LOADING.search(failure.error_text):
        return None
    return _of_all(known, version) if known.presence.there else _of_none(known, failure)


_IS_LOADING = re.compile(r"partially initialized|unknown location")
"""A module is not yet executed, or not the package at all: its release does not matter."""


# ------------------------------------------------------------------------------------------ some releases have it


def _of_releases(known: KnownName, bounds: Bounds, version: Version | None, failure: Traceback) -> ApiRule:
    """Only some releases have it: which of them to install, or what to write instead."""
    package, rule = known.table.package, _rule(bounds, version)
    pin = f"{package}{bounds.specifier}"
    is_oldest = bounds.since == known.table.versions[0]
    values: dict[str, object] = {
        "name": known.spelling,
        "package": package,
        "since": phrase_text("or-earlier", version=bounds.since) if is_oldest else bounds.since_text,
        "last": bounds.last,
        "again": bounds.again,
        "version": version,
        "pin": pin,
        "yours": _yours(package, version, bounds),
        "instead": _instead(known, failure),
    }
    is_of_any_class = rule == "api-between" or known.missing.kind is MissingKind.ATTRIBUTE
    guessed = "possible" if is_of_any_class else "likely"
    certainty = "sure" if version else guessed
    folder = checkout_of(known.missing)
    remedy = phrase_text("update-checkout", folder=folder, package=package, pin=pin) if folder else None
    return ApiRule(rule, known.table, certainty, values, remedy)


def _rule(bounds: Bounds, version: Version | None) -> str:
    if bounds.since is None:
        return "api-is-gone"
    if bounds.again:
        return "api-returned"
    return "api-came-later" if version or bounds.until is None else "api-between"


def _yours(package: str, version: Version | None, bounds: Bounds) -> Text:
    """What is known of the installed release."""
    if version:
        return phrase_text("yours-is", package=package, version=version)
    return phrase_text("yours-or-older", first=bounds.first) if bounds.first else phrase_text("yours-unknown")


def _instead(known: KnownName, failure: Traceback) -> Text:
    """What to write, or which package to update, instead of returning to an old release."""
    package, missing = known.table.package, known.missing
    target = f"{missing.owner}:{missing.name}" if missing.kind in NAME_KINDS else ""
    importer = _package_of(asker(failure))
    if importer and importer != package:
        own = table(importer)
        new = own.dropped(target) if own and target else None
        return phrase_text("update-importer" if new else "fits", importer=importer, version=new)
    if known.instead:
        return phrase_text("write-instead", new=known.instead)
    return phrase_text("go-back-file" if re.match(r"\w+Config\(", str(known.spelling)) else "go-back")


def _of_replaced(known: KnownName, version: Version | None) -> ApiRule | None:
    """An attribute is of a class which another one of the same name replaced."""
    own, missing = known.table, known.missing
    replacement = own.replaced(missing.owner, missing.name) if missing.kind is MissingKind.ATTRIBUTE else None
    if replacement is None or (version and version < Version(own.versions[replacement.since])):
        return None
    values = {"name": missing.name, "kind": missing.owner, "package": own.package, "old": replacement.old}
    values |= {
        "new": replacement.new,
        "since": own.versions[replacement.since],
        "last": own.versions[replacement.last],
    }
    return ApiRule("class-replaced", own, "likely" if version else "possible", values)


# ------------------------------------------------------------------------------------------ all have it, or none


def _of_all(known: KnownName, version: Version | None) -> ApiRule | None:
    """Each release has it, of the past years at least: the installed one is older."""
    first = known.table.versions[min(known.presence.there)]
    is_named = known.missing.kind in (MissingKind.IMPORT, MissingKind.MODEL_TYPE)
    if not (is_named and known.presence.is_everywhere) or (version and version >= Version(first)):
        return None
    values = {"name": known.spelling, "package": known.table.package, "first": first}
    return ApiRule("installed-before", known.table, "likely", values)


def _of_none(known: KnownName, failure: Traceback) -> ApiRule | None:
    """No known release has it: the code is for an older one, or the name is of another package, or misspelled."""
    missing, own = known.missing, known.table
    values: dict[str, object] = {"name": known.spelling, "package": own.package}
    values |= {"first": own.versions[0], "last": own.versions[-1]}
    if missing.kind is MissingKind.MODEL_TYPE:
        return ApiRule("model-type-of-none", own, "likely", values | {"name": missing.name})
    is_name = missing.kind in NAME_KINDS and missing.owner in own.raw["names"]
    cure = Text.lines([*_meant(missing, own), *_updates(own, failure)])
    is_of_package = is_name or missing.kind is MissingKind.MODULE
    return ApiRule("gone-before", own, "possible", values | {"cure": cure}) if is_of_package else None


MODEL_LIBRARIES = ("transformers", "peft", "torch", "accelerate", "datasets")
"""Packages whose names others also export."""
LEAST_SIMILARITY = 0.75
"""Minimum similarity of a suggested name."""


def _meant(missing: Missing, own: ApiTable) -> Iterator[Text]:
    """The package that has an imported name, or else the most similar name."""
    if missing.kind is not MissingKind.IMPORT:
        return
    every = tables(packages_with(dict.fromkeys((*MODEL_LIBRARIES, *PACKAGE_ROOTS)), missing.name))
    others = (each.root for each in every if each.name(each.root, missing.name).there)
    if other := next(others, None):
        yield phrase_text("name-of-other", name=missing.name, other=other)
    elif near := closest(missing.name, own.exports(missing.owner), cutoff=LEAST_SIMILARITY):
        yield phrase_text("nearest-name", name=near[0])


FIRST_KNOWN_RELEASE = Version("0.5")
"""If the oldest known release is at least this one, it was not the package's first."""


def _updates(own: ApiTable, failure: Traceback) -> Iterator[Text]:
    """The calling package, and the releases before the known ones."""
    yield update_of(failure)
    if Version(own.versions[0]) >= FIRST_KNOWN_RELEASE:
        yield phrase_text("older-release", pin=f"{own.package}<{own.versions[0]}")


# ------------------------------------------------------------------------------------------ who, and which release


def version_of(package: str, failure: Traceback, log: Log) -> Version | None:
    """The version in a log, or the one installed here if the failure's files are here."""
    here = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    version = log.versions.get(package)
    if version is None and any(frame.startswith(here) for frame in failure.frames):
        version = installed_version(package)
    with suppress(InvalidVersion):
        return Version(version) if version else None
    return None


def _package_of(frame: str) -> str | None:
    """The package in the history to which a frame's file belongs."""
    match = re.search(r"(?:site|dist)-packages[/\\](?P<root>\w+)[/\\]", frame)
    return PACKAGE_OF_ROOT.get(match["root"]) if match else None
