"""What a log's failure reports as missing: which release added it, which removed it, where it moved."""

from __future__ import annotations

import re
import sysconfig
from contextlib import suppress
from dataclasses import replace

from packaging.version import InvalidVersion, Version

from reshard.base.suggest import closest
from reshard.diagnosis.finding import Finding, Place, Text
from reshard.diagnosis.history.having import having
from reshard.diagnosis.history.missing import (
    ASKED,
    ATTRIBUTE,
    IMPORT,
    KEY,
    MEMBER,
    MODEL_TYPES,
    MODULE,
    OF_NAMES,
    QUOTE,
    TYPE,
    Missing,
    checkout_of,
    copy_of,
    forwarded,
    imported,
    imported_name,
    is_shadowed,
    table_of,
)
from reshard.diagnosis.history.table import PACKAGES, ROOTS, Bounds, Table, table, tables
from reshard.diagnosis.history.versions import installed_version
from reshard.diagnosis.imports import imports_itself
from reshard.diagnosis.installing import with_interpreter
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import told, told_at
from reshard.diagnosis.upstream import asker
from reshard.diagnosis.words import words

_CLASH = re.compile(rf"{QUOTE}(?P<name>[\w.-]+){QUOTE} is already used by a Transformers config")
_HALF = re.compile(r"cannot import name '_\w+' from 'numpy\._?core")
"""A name that only numpy itself imports: part of it was replaced while it was in memory."""
_SITE = re.compile(r"(?:site|dist)-packages[/\\](?P<root>\w+)[/\\]")


def of_failure(root: Traceback, log: Log) -> Finding | None:
    """The finding of a failure according to the history of releases; None if it has nothing."""
    if _HALF.search(root.said):
        return None
    failure: Traceback | None = root
    while failure is not None:  # an exception, then the earlier one in its chain
        if match := _CLASH.search(failure.said):
            return _clash(match["name"], failure, log)
        own = _package_of(asker(failure)) or _own_checkout(failure)
        if MODULE.search(failure.said) and imports_itself(failure, log):
            return None
        for asked, found in ((ask, hit) for ask in ASKED for hit in ask(failure.said, failure, log)):
            if found.table.package == own and asked in OF_NAMES:
                return None  # one release knows its own names: see `of_one_package`
            version = version_of(found.table.package, failure, log)
            bounds = found.bounds(version)
            if bounds is None and asked is imported and found.everywhere:
                return _before_all(found, version, failure, log)
            return _finding(found, bounds, version, failure, log) if bounds else None
        failure = failure.before
    return None


def _own_checkout(failure: Traceback) -> str | None:
    """The package of which a checkout imports a name from itself; None for other failures."""
    match = IMPORT.search(failure.said)
    folder = copy_of(match) if match else ""
    same = match and folder and asker(failure).replace("\\", "/").startswith(f"{folder}/")
    return PACKAGES.get(match["module"].partition(".")[0]) if match and same else None


def _before_all(found: Missing, version: Version | None, failure: Traceback, log: Log) -> Finding | None:
    """The finding that the installed release is older than any known one: all of these have the name."""
    if "partially initialized" in failure.said or "unknown location" in failure.said:
        return None
    first = found.table.versions[min(found.presence.there)]
    if version and version >= Version(first):
        shown: dict[str, object] = {"name": found.name, "package": found.table.package, "version": version}
        return _told("name-conditional", shown, "likely", found.table, failure, log)
    python = re.search(r"/python(3\.\d+)/", failure.said)
    own = words("python-of-path", python=python[1]) if python else Text.same("")
    values: dict[str, object] = {
        "name": found.name,
        "package": found.table.package,
        "first": first,
        "python": own,
    }
    return _told("installed-before", values, "likely", found.table, failure, log)


def of_one_package(root: Traceback, log: Log) -> Finding | None:
    """The finding that caller and called code belong to one package, none of whose releases has the name."""
    said, importer = root.said, _package_of(asker(root))
    own = table(importer) if importer else None
    match = ATTRIBUTE.search(said) or MEMBER.search(said) or IMPORT.search(said)
    if own is None or match is None or is_shadowed(match.groupdict().get("path")):
        return None
    asked = match.groupdict()
    whole = asked.get("module", "").partition(".")[0] == ROOTS[own.package]
    if not whole and asked.get("kind") not in own.raw["attributes"]:
        return None
    version = version_of(own.package, root, log)
    kind = asked.get("kind")
    first = _always_since(own, kind, asked["name"]) if version is None and kind else None
    if first:
        return _told(
            "installed-before",
            {
                "name": asked["name"],
                "package": own.package,
                "first": first,
                "python": Text.same(""),
            },
            "possible",
            own,
            root,
            log,
        )
    values: dict[str, object] = {
        "package": own.package,
        "frame": asker(root),
        "asked": asked.get("kind") or asked["module"],
        "name": asked["name"],
        "release": f"{own.package} {version}" if version else own.package,
    }
    return _told("one-package", values, "possible", own, root, log)


def _always_since(own: Table, kind: str, name: str) -> str | None:
    """The release from which on a class of a package has an attribute; None if it is not in all or not certain."""
    if any(len(own.attribute(each, name).there) == len(own.versions) for each in own.raw["attributes"]):
        return own.versions[0]
    there = forwarded(kind, name)
    return own.versions[min(there)] if own.last in there else None


def of_no_transformers(root: Traceback, log: Log) -> Finding | None:
    """A model type that no known release of transformers has, or that all have: the installed one is older than these.

    If none has it, it is another package's, or comes with the model's own code.
    """
    for failure in (root, *([root.before] if root.before else [])):
        match = TYPE.search(failure.said)
        if match is None and MODEL_TYPES.search("\n".join([*failure.frames, failure.source])):
            match = KEY.search(failure.said)
        own = table("transformers") if match else None
        if match and own and not own.key(match["name"]).there:
            values: dict[str, object] = {
                "name": match["name"],
                "first": own.versions[0],
                "last": own.versions[-1],
            }
            return _told("model-type-of-none", values, "likely", own, root, log)
        if match and own and own.key(match["name"]).there == own.every:
            older = {"name": match["name"], "first": own.versions[0]}
            return _told("model-type-of-later", older, "likely", own, root, log)
    return None


OWNERS = ("transformers", "peft", "torch", "accelerate", "datasets")
"""Packages whose names others also export."""
FIRST_READ = Version("0.5")
"""If the oldest known release is at least this one, it was not the package's first."""
NEAR = 0.75
"""Minimum similarity of a suggested name."""


_NOWHERE = re.compile(
    rf"cannot import name {QUOTE}\w+{QUOTE} from {QUOTE}(?P<module>\w+){QUOTE} \(unknown location\)"
)


_ITSELF = re.compile(
    rf"partially initialized module {QUOTE}(?P<module>\w+){QUOTE}[^(\n]{{0,80}}"
    r"\(most likely due to a circular import\) \((?P<path>[^)\n]{1,300}[/\\](?P=module)\.py)\)"
)


def of_shadow(root: Traceback, log: Log) -> Finding | None:
    """The finding that a folder or file of the same name is imported instead of a package.

    Without `__init__.py`, Python reports "unknown location"; a file that imports the package imports itself.
    """
    if (match := _ITSELF.search(root.said)) and is_shadowed(match["path"]):
        shown = {"module": match["module"], "folder": words("folder-of-path", path=match["path"])}
        return told_at(("folder-for-package", shown), log.name, root.last, root.said)
    if match := _NOWHERE.search(root.said):
        own = next(table_of(match["module"]), None)
        shown = {"module": match["module"], "folder": words("folder-without-init", module=match["module"])}
        return _told("folder-for-package", shown, "likely", own, root, log) if own else None
    if own_file := _own_file(root):
        module, path = own_file
        shown = {"module": module, "folder": words("file-of-same-name", module=module, path=path)}
        return told(
            "folder-for-package", [Place.of(log.name, root.last, root.said)], shown, certainty="likely"
        )
    match = IMPORT.search(root.said)
    if match is None or "." in match["module"] or not is_shadowed(match["path"]):
        return None
    found = next((each for each in imported_name(match) if each.everywhere), None)
    if found is None or "partially initialized" in root.said:
        return None
    shown = {"module": match["module"], "folder": words("folder-of-path", path=match["path"])}
    return _told("folder-for-package", shown, "likely", found.table, root, log)


_PARTIAL = re.compile(r"partially initialized module '(?P<module>\w+)'")


def _own_file(root: Traceback) -> tuple[str, str] | None:
    """The user's file with the name of the module that it imports, and so is imported instead of it."""
    match = _PARTIAL.search(root.said)
    if match is None:
        return None
    paths = [frame.rpartition(" ")[0].rpartition(":")[0] for frame in root.frames]
    named = re.compile(rf"(?:^|[/\\]){match['module']}\.py$")
    path = next((each for each in paths if named.search(each) and is_shadowed(each)), None)
    return (match["module"], path) if path else None


def of_older_release(root: Traceback, log: Log) -> Finding | None:
    """The finding that no known release has an attribute of a module: the code was written for older ones."""
    if module := _gone_module(root, log):
        return module
    match = ATTRIBUTE.search(root.said)
    own = next(table_of(match["module"]), None) if match else None
    if match is None or own is None or own.raw["names"].get(match["module"]) is None:
        return None
    if own.name(match["module"], match["name"]).there or is_shadowed(match.groupdict().get("path")):
        return None
    values: dict[str, object] = {"name": f"{match['module']}.{match['name']}", "package": own.package}
    values |= {"first": own.versions[0], "last": own.versions[-1], "update": _asking(root, own)}
    return _told("gone-before", values, "possible", own, root, log)


def _gone_module(root: Traceback, log: Log) -> Finding | None:
    """The same for a module of a package: `transformers.modeling_bert` is in no release since 4."""
    match = MODULE.search(root.said)
    own = next(table_of(match["module"]), None) if match and "." in match["module"] else None
    if match is None or own is None or own.module(match["module"]).there:
        return None
    if _in_checkout(root, own):
        shown: dict[str, object] = {"name": match["module"], "package": own.package, "frame": asker(root)}
        return _told("checkout-and-package", shown, "likely", own, root, log)
    values: dict[str, object] = {"name": match["module"], "package": own.package}
    values |= {"first": own.versions[0], "last": own.versions[-1], "update": _asking(root, own)}
    return _told("gone-before", values, "possible", own, root, log)


def _in_checkout(root: Traceback, own: Table) -> bool:
    """Whether the caller is in a checkout of the package itself."""
    path = asker(root).replace("\\", "/")
    return f"/{own.raw['root']}/" in path and not _SITE.search(path)


def _asking(root: Traceback, own: Table) -> Text:
    """What to update: the calling package, if the frames show one."""
    found = (hit["root"] for frame in root.frames[::-1] if (hit := _SITE.search(frame)))
    asking = next((each for each in found if each != own.raw["root"]), None)
    return words("update-asker", package=asking.replace("_", "-")) if asking else words("update-both")


def of_no_release(root: Traceback, log: Log) -> Finding | None:
    """The finding that an imported name is in no known release, with the most similar one."""
    match = IMPORT.search(root.said)
    own = next(table_of(match["module"]), None) if match else None
    if (
        match is None
        or own is None
        or is_shadowed(match["path"])
        or own.name(match["module"], match["name"]).there
    ):
        return None
    module = own.raw["names"].get(match["module"])
    if module is None or "partially initialized" in root.said:
        return None
    names = {name for group in module.values() for name in group.split(" ")}
    near = closest(match["name"], names, cutoff=NEAR)
    values: dict[str, object] = {"name": match["name"], "module": match["module"], "package": own.package}
    values |= {"first": own.versions[0], "last": own.versions[-1]}
    values["near"] = words("nearest-name", name=near[0]) if near else Text.same("")
    every = tables(having(dict.fromkeys((*OWNERS, *ROOTS)), match["name"]))
    others = (each.raw["root"] for each in every if each.name(each.raw["root"], match["name"]).there)
    if other := next(others, None):
        values["near"] = words("name-of-other", name=match["name"], other=other)
    elif not near and Version(own.versions[0]) >= FIRST_READ:
        values |= {"name": f"{match['module']}.{match['name']}", "update": _asking(root, own)}
        return _told("gone-before", values, "possible", own, root, log)
    return _told("in-no-release", values, "possible", own, root, log)


# ------------------------------------------------------------------------------------------ what is installed


def version_of(package: str, root: Traceback, log: Log) -> Version | None:
    """The version in a log, or the one installed here if the failure's files are here."""
    here = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    told = log.versions.get(package)
    if told is None and any(frame.startswith(here) for frame in root.frames):
        told = installed_version(package)
    with suppress(InvalidVersion):
        return Version(told) if told else None
    return None


# ------------------------------------------------------------------------------------------ findings


def _finding(
    found: Missing, bounds: Bounds, version: Version | None, failure: Traceback, log: Log
) -> Finding:
    kind = "api-came-later" if bounds.until is None or (version and bounds.since) else "api-between"
    kind = "api-is-gone" if bounds.since is None else "api-returned" if bounds.again else kind
    package = found.table.package
    is_oldest = bounds.since == found.table.versions[0]
    values: dict[str, object] = {
        "name": found.name,
        "package": package,
        "since": words("or-earlier", version=bounds.since) if is_oldest else bounds.shown,
        "until": bounds.until or bounds.last,
        "last": bounds.last,
        "again": bounds.again or "",
        "version": version or "",
        "pin": f"{package}{bounds.specifier}",
        "yours": _yours(package, version, bounds),
        "instead": _instead(found, failure),
    }
    certainty = (
        "sure" if version else "likely" if kind != "api-between" and not found.of_object else "possible"
    )
    told_of = _told(kind, values, certainty, found.table, failure, log)
    match = IMPORT.search(failure.said)
    if match and (folder := checkout_of(match["path"], match["module"])):
        remedy = words("update-checkout", folder=folder, package=package, pin=values["pin"])
        return replace(told_of, remedy=remedy)
    return told_of


def _yours(package: str, version: Version | None, bounds: Bounds) -> Text:
    """What is known of the installed release."""
    if version:
        return words("yours-is", package=package, version=version)
    return words("yours-or-older", first=bounds.first) if bounds.first else words("yours-unknown")


def _clash(name: str, failure: Traceback, log: Log) -> Finding | None:
    """A model type that transformers now has itself, and another package registers again."""
    found = table("transformers")
    presence = found.key(name) if found else None
    if found is None or presence is None or not presence.there or min(presence.there) == 0:
        return None
    importer = next(
        (each for frame in failure.frames[::-1] if (each := _package_of(frame)) != "transformers"), None
    )
    since = found.versions[min(presence.there)]
    values: dict[str, object] = {
        "name": name,
        "since": since,
        "importer": Text(importer, f"{importer} ") if importer else words("another-package"),
        "update": words("update-package", importer=importer) if importer else "",
        "pin": f"transformers<{since}",
    }
    return _told("api-clash", values, "sure" if importer else "likely", found, failure, log)


def _told(
    kind: str, values: dict[str, object], certainty: str, found: Table, failure: Traceback, log: Log
) -> Finding:
    place = Place.of(log.name, failure.last, failure.said)
    finding = told(kind, [place], values, certainty=certainty, evidence=[read_from(found)])
    return replace(finding, remedy=with_interpreter(finding.remedy, log))


def read_from(found: Table) -> Text:
    """The releases from which the table was made, and when."""
    return words(
        "history-read",
        package=found.package,
        first=found.versions[0],
        last=found.versions[-1],
        date=found.date,
    )


OF_SCRIPTS = ("trl", "peft")
"""Packages that scripts import, and few other packages."""


def _instead(found: Missing, failure: Traceback) -> Text:
    """What to write, or which package to update, instead of returning to an old release."""
    if not failure.frames and found.instead and found.table.package in OF_SCRIPTS:
        return words("write-instead", new=found.instead)
    importer = _package_of(asker(failure)) if failure.frames else _who_dropped(found)
    if importer not in (None, found.table.package) and importer:
        own = table(importer)
        new = own.dropped(found.target) if own and found.target else None
        if new and not failure.frames:
            return words("update-if-importer", importer=importer, version=new)
        return (
            words("update-importer", importer=importer, version=new)
            if new
            else words("fits", importer=importer)
        )
    if found.instead:
        return words("write-instead", new=found.instead)
    return words("go-back-file" if re.match(r"\w+Config\(", str(found.name)) else "go-back")


def _who_dropped(found: Missing) -> str | None:
    """The only package that imported a name and no longer does, if a log does not show the caller."""
    packages = having(ROOTS, found.target) if found.target else []
    asking = [own.package for own in tables(packages) if own.dropped(found.target)]
    return asking[0] if len(asking) == 1 else None


def _package_of(frame: str) -> str | None:
    """The package in the history to which a frame's file belongs."""
    match = _SITE.search(frame)
    return PACKAGES.get(match["root"]) if match else None
