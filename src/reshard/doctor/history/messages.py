"""What a log's failure says is missing, looked up: which release brought it, which dropped it, where it went."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from packaging.version import InvalidVersion, Version

from reshard.doctor.finding import Finding, Place, Text
from reshard.doctor.history.calls import base_of
from reshard.doctor.history.table import PACKAGES, ROOTS, Bounds, Presence, Table, table, tables
from reshard.doctor.kinds import filled_in
from reshard.doctor.log import Log, Traceback
from reshard.doctor.reading import clipped
from reshard.doctor.rules import told
from reshard.doctor.upstream import asker
from reshard.doctor.words import words
from reshard.suggest import closest

_Q = r"[`'\"‘’“”]"
_IMPORT = re.compile(
    rf"cannot import name {_Q}(?P<name>\w+){_Q}? from {_Q}(?P<module>[\w.]+){_Q}(?: \((?P<path>[^)]+)\))?"
)
_MODULE = re.compile(rf"No module named {_Q}?(?P<module>\w+(?:\.\w+)+){_Q}?(?!.*is not a package)")
_ATTRIBUTE = re.compile(
    rf"(?<!initialized )module {_Q}(?P<module>[\w.]+){_Q} has no attribute {_Q}(?P<name>\w+)"
)
_MEMBER = re.compile(
    rf"(?:type object )?{_Q}(?P<kind>\w+){_Q}(?: object)? has no attribute {_Q}(?P<name>\w+)"
)
_F = r"(?<![\w.<>])(?P<function>[\w.<>]+)\(\)"
_KEYWORD = re.compile(rf"{_F} got an unexpected keyword argument {_Q}(?P<name>\w+)")
_NEEDED = re.compile(rf"{_F} missing \d+ required (?:positional|keyword-only) arguments?: {_Q}(?P<name>\w+)")
_GIVEN = re.compile(
    rf"{_F} takes (?:from \d+ to )?(?P<takes>\d+) positional arguments?"
    r" but (?P<given>\d+) (?:was|were)"
)
_KEY = re.compile(r"KeyError: ['\"](?P<name>[a-z][\w-]{2,60})['\"]")
_MODEL_TYPES = re.compile(r"CONFIG_MAPPING|configuration_auto|Auto(?:Config|Model|Processor|Tokenizer)\b")
_TYPE = re.compile(rf"model type {_Q}(?P<name>[\w.-]+){_Q} but Transformers does not recognize")
_ARCHITECTURE = re.compile(
    rf"Model architectures? \[{_Q}(?P<name>\w+){_Q}.*(?:not supported|no vLLM implementation)"
)
_CLASH = re.compile(rf"{_Q}(?P<name>[\w.-]+){_Q} is already used by a Transformers config")
_SITE = re.compile(r"(?:site|dist)-packages[/\\](?P<root>\w+)[/\\]")


@dataclass(frozen=True)
class Missing:
    """What is missing where it was looked for: a name as people write it, and when its package has it."""

    name: str | Text
    presence: Presence
    instead: str | None = None
    target: str = ""
    """`module:name` as another package would import it."""
    of_object: bool = False
    """Whether it is an attribute of a class by this name, which may be another class."""
    wider: Presence | None = None
    """When it may have been taken, decorators and `**` included."""

    def bounds(self, version: Version | None) -> Bounds | None:
        """Which releases have it, seen from one that has not."""
        known = self.wider.bounds(version) if self.wider and version else None
        return known or self.presence.bounds(version)

    @property
    def table(self) -> Table:
        return self.presence.table

    @property
    def everywhere(self) -> bool:
        """Whether every release that was read has it."""
        return len(self.presence.there) == len(self.table.versions)


def of_failure(root: Traceback, log: Log) -> Finding | None:
    """The finding of a failure whose direction the history knows; None if it says nothing."""
    failure: Traceback | None = root
    while failure is not None:  # an exception, then the one that it says came before
        if match := _CLASH.search(failure.said):
            return _clash(match["name"], failure, log)
        own = _package_of(asker(failure))
        for asked, found in ((ask, hit) for ask in ASKED for hit in ask(failure.said, failure, log)):
            if found.table.package == own and asked in OF_NAMES:
                return None  # one release knows its own names: see `of_one_package`
            version = version_of(found.table.package, failure, log)
            bounds = found.bounds(version)
            if bounds is None and asked is _imported and found.everywhere:
                return _before_all(found, failure, log)
            return _finding(found, bounds, version, failure, log) if bounds else None
        failure = failure.before
    return None


def _before_all(found: Missing, failure: Traceback, log: Log) -> Finding | None:
    """That the installed release is older than any that was read: all of these have the name."""
    if "partially initialized" in failure.said or "unknown location" in failure.said:
        return None
    python = re.search(r"/python(3\.\d+)/", failure.said)
    own = words("python-of-path", python=python[1]) if python else Text.same("")
    values: dict[str, object] = {
        "name": found.name,
        "package": found.table.package,
        "first": found.table.versions[0],
        "python": own,
    }
    return _told("installed-before", values, "likely", found.table, failure, log)


def of_one_package(root: Traceback, log: Log) -> Finding | None:
    """That who asks and who is asked belong to one package, none of whose releases has what is asked for."""
    said, importer = root.said, _package_of(asker(root))
    own = table(importer) if importer else None
    match = _ATTRIBUTE.search(said) or _MEMBER.search(said) or _IMPORT.search(said)
    if own is None or match is None or _is_shadowed(match.groupdict().get("path")):
        return None
    asked = match.groupdict()
    whole = asked.get("module", "").partition(".")[0] == ROOTS[own.package]
    if not whole and asked.get("kind") not in own.raw["attributes"]:
        return None
    version = version_of(own.package, root, log)
    values: dict[str, object] = {
        "package": own.package,
        "frame": asker(root),
        "asked": asked.get("kind") or asked["module"],
        "name": asked["name"],
        "release": f"{own.package} {version}" if version else own.package,
    }
    return _told("one-package", values, "possible", own, root, log)


def of_no_transformers(root: Traceback, log: Log) -> Finding | None:
    """A model type that no release of transformers has: it is another package's, or comes with the model's own code."""
    own = table("transformers")
    for failure in (root, *([root.before] if root.before else [])):
        match = _TYPE.search(failure.said)
        if match is None and _MODEL_TYPES.search("\n".join([*failure.frames, failure.source])):
            match = _KEY.search(failure.said)
        if match and own and not own.key(match["name"]).there:
            values: dict[str, object] = {
                "name": match["name"],
                "first": own.versions[0],
                "last": own.versions[-1],
            }
            return _told("model-type-of-none", values, "likely", own, root, log)
    return None


OWNERS = ("transformers", "peft", "torch", "accelerate", "datasets")
"""Packages whose names others export, too."""
FIRST_READ = Version("0.5")
"""The oldest release that was read is not the first that there was, if it is as late as this one."""
NEAR = 0.75
"""How alike a name has to be to one that was asked for."""


_NOWHERE = re.compile(rf"cannot import name {_Q}\w+{_Q} from {_Q}(?P<module>\w+){_Q} \(unknown location\)")


def of_shadow(root: Traceback, log: Log) -> Finding | None:
    """That a folder without `__init__.py` stands for a package: Python says "unknown location" of such a one."""
    match = _NOWHERE.search(root.said)
    own = next(_table_of(match["module"]), None) if match else None
    return (
        _told("folder-for-package", {"module": match["module"]}, "likely", own, root, log)
        if match and own
        else None
    )


def of_older_release(root: Traceback, log: Log) -> Finding | None:
    """That an attribute of a module is in none of the releases that were read: the code was written before them."""
    if module := _gone_module(root, log):
        return module
    match = _ATTRIBUTE.search(root.said)
    own = next(_table_of(match["module"]), None) if match else None
    if match is None or own is None or own.raw["names"].get(match["module"]) is None:
        return None
    if own.name(match["module"], match["name"]).there or _is_shadowed(match.groupdict().get("path")):
        return None
    values: dict[str, object] = {"name": f"{match['module']}.{match['name']}", "package": own.package}
    values |= {"first": own.versions[0], "last": own.versions[-1], "update": _asking(root, own)}
    return _told("gone-before", values, "possible", own, root, log)


def _gone_module(root: Traceback, log: Log) -> Finding | None:
    """The same of a module of a package: `transformers.modeling_bert` is none of any release since 4."""
    match = _MODULE.search(root.said)
    own = next(_table_of(match["module"]), None) if match and "." in match["module"] else None
    if match is None or own is None or own.module(match["module"]).there:
        return None
    values: dict[str, object] = {"name": match["module"], "package": own.package}
    values |= {"first": own.versions[0], "last": own.versions[-1], "update": _asking(root, own)}
    return _told("gone-before", values, "possible", own, root, log)


def _asking(root: Traceback, own: Table) -> Text:
    """Whom to update: the package that asks, if the frames show one."""
    found = (hit["root"] for frame in root.frames[::-1] if (hit := _SITE.search(frame)))
    asking = next((each for each in found if each != own.raw["root"]), None)
    return words("update-asker", package=asking.replace("_", "-")) if asking else words("update-both")


def of_no_release(root: Traceback, log: Log) -> Finding | None:
    """That an imported name is in no release that was read, with the one that is most like it."""
    match = _IMPORT.search(root.said)
    own = next(_table_of(match["module"]), None) if match else None
    if (
        match is None
        or own is None
        or _is_shadowed(match["path"])
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
    every = tables(dict.fromkeys((*OWNERS, *ROOTS)))
    others = [each.raw["root"] for each in every if each.name(each.raw["root"], match["name"]).there]
    if others:
        values["near"] = words("name-of-other", name=match["name"], other=others[0])
    elif not near and Version(own.versions[0]) >= FIRST_READ:
        values |= {"name": f"{match['module']}.{match['name']}", "update": _asking(root, own)}
        return _told("gone-before", values, "possible", own, root, log)
    return _told("in-no-release", values, "possible", own, root, log)


# ------------------------------------------------------------------------------------------ what is missing


def _imported(said: str, root: Traceback, log: Log) -> Iterator[Missing]:
    match = _IMPORT.search(said)
    if match is None or _is_shadowed(match["path"]):
        return
    for found in _table_of(match["module"]):
        yield _name(found, match["module"], match["name"], f"{match['module']}.{match['name']}")


def _attribute(said: str, root: Traceback, log: Log) -> Iterator[Missing]:
    if match := _ATTRIBUTE.search(said):
        for found in _table_of(match["module"]):
            yield _name(found, match["module"], match["name"], f"{match['module']}.{match['name']}")


def _name(found: Table, module: str, name: str, shown: str) -> Missing:
    presence = found.name(module, name)
    return Missing(shown, presence, _moved(presence, name, module), f"{module}:{name}")


def _moved(presence: Presence, name: str, module: str) -> str | None:
    """Where a name is found after the last release that has it at its place."""
    after = max(presence.there, default=presence.table.last) + 1
    if after > presence.table.last:
        return None
    other = presence.table.elsewhere(name, module, presence.table.versions[after])
    return f"from {other} import {name}" if other else None


def _module(said: str, root: Traceback, log: Log) -> Iterator[Missing]:
    match = _MODULE.search(said)
    for found in _table_of(match["module"]) if match else ():
        presence = found.module(match["module"]) if match else None
        if match and presence and presence.there:
            yield Missing(match["module"], presence, _module_moved(presence, match["module"]))


def _module_moved(presence: Presence, module: str) -> str | None:
    """A module of the same last name after the last release that has it; None if there are several."""
    after = max(presence.there) + 1
    last = f".{module.rpartition('.')[2]}"
    every = presence.table.modules.items()
    found = [
        other for other, span in every if other.endswith(last) and after in span and after - 1 not in span
    ]
    return f"import {found[0]}" if len(found) == 1 else None


def _member(said: str, root: Traceback, log: Log) -> Iterator[Missing]:
    if (match := _MEMBER.search(said)) and not _ATTRIBUTE.search(said):
        kind, name = match["kind"], match["name"]
        yield from _wherever(
            root, log, lambda own: Missing(f"{kind}.{name}", own.attribute(kind, name), of_object=True)
        )


def _keyword(said: str, root: Traceback, log: Log) -> Iterator[Missing]:
    if match := _KEYWORD.search(said):
        for function in _functions(match["function"], root, log):
            kind = function.removesuffix(".__init__")
            yield from _wherever(root, log, partial(_taken, function=function, name=match["name"]), kind)


def _taken(found: Table, function: str, name: str) -> Missing:
    """A parameter of a function, or of the bases of its class in other packages."""
    presence, renames = found.own_parameter(function, name), dict(found.renames)
    wider = found.parameter(function, name)
    for base in map(base_of, found.marked(function)):
        if base and not presence.there:
            presence, renames = base[0].own_parameter(base[1], name), {**base[0].renames, **renames}
            wider = base[0].parameter(base[1], name)
    new = renames.get(name)
    shown = f"{function.removesuffix('.__init__')}({name}=…)"
    return Missing(shown, presence, f"{new}=…" if new else None, wider=wider)


def _needed(said: str, root: Traceback, log: Log) -> Iterator[Missing]:
    if match := _NEEDED.search(said):
        for function in _functions(match["function"], root, log):
            shown = words("without-argument", function=function.removesuffix(".__init__"), name=match["name"])
            yield from _wherever(root, log, partial(_required, shown, function, match["name"]))


def _given(said: str, root: Traceback, log: Log) -> Iterator[Missing]:
    if match := _GIVEN.search(said):
        more = int(match["given"]) - int(match["takes"])
        for function in _functions(match["function"], root, log):
            shown = words("more-arguments", function=function.removesuffix(".__init__"), count=more)
            yield from _wherever(root, log, partial(_counted, shown, function, more))


def _required(shown: Text, function: str, name: str, found: Table) -> Missing:
    return Missing(shown, found.needed(function, name))


def _counted(shown: Text, function: str, more: int, found: Table) -> Missing:
    return Missing(shown, found.arity(function, more))


def _functions(function: str, root: Traceback, log: Log) -> list[str]:
    """The qualified names that a message may mean: Python 3.9 writes `__init__()` for that of any class."""
    if function != "__init__":
        return [function]
    source = next((line.text for line in log.lines if line.number == root.last - 1), "")
    return [f"{name}.__init__" for name in re.findall(r"\b([A-Z]\w*)\(", source)]


def _type(said: str, root: Traceback, log: Log) -> Iterator[Missing]:
    match, found = _TYPE.search(said), table("transformers")
    if match is None and _MODEL_TYPES.search(log.text):
        match = _KEY.search(said)
    if match and found:
        yield Missing(f"model_type {match['name']}", found.key(match["name"]))


def _architecture(said: str, root: Traceback, log: Log) -> Iterator[Missing]:
    match, found = _ARCHITECTURE.search(said), table("vllm")
    if match and found:
        yield Missing(match["name"], found.key(match["name"]))


ASKED: tuple[Callable[[str, Traceback, Log], Iterator[Missing]], ...] = (
    *(_imported, _attribute, _module, _keyword, _needed, _given, _type, _architecture, _member),
)


OF_NAMES = (_imported, _attribute, _member)


def _wherever(
    root: Traceback, log: Log, ask: Callable[[Table], Missing], kind: str = ""
) -> Iterator[Missing]:
    """What one package alone knows: of those that the failure mentions, or of all, where none of these knows it.

    Of several that have a class of one name, the one counts from whose root it is imported.
    """
    mentioned = _mentioned(root, log)
    known = [each for each in map(ask, tables(mentioned)) if each.presence.there]
    if not known:
        others = tables(package for package in ROOTS if package not in mentioned)
        known = [each for each in map(ask, others) if each.presence.there]
    known = list({each.table.package: each for each in known}.values())  # a subclass has what its base has
    if len(known) > 1 and kind:
        known = [each for each in known if each.table.name(each.table.raw["root"], kind).there]
    yield from known if len(known) == 1 else []


def _is_shadowed(path: str | None) -> bool:
    """Whether a module was read from elsewhere than where packages are installed."""
    return path is not None and not re.search(r"(?:site|dist)-packages|/\.local/", path)


def _table_of(module: str) -> Iterator[Table]:
    return tables([PACKAGES[root]] if (root := module.partition(".")[0]) in PACKAGES else [])


def _mentioned(root: Traceback, log: Log) -> list[str]:
    """Packages whose files or names the failure's own lines show."""
    shown = "\n".join(line.text for line in log.lines if root.first <= line.number <= root.end)
    text = "\n".join([*root.frames, root.said, shown])
    return [package for package, name in ROOTS.items() if re.search(rf"(?<![\w-]){name}(?![\w-])", text)]


# ------------------------------------------------------------------------------------------ what is installed


def version_of(package: str, root: Traceback, log: Log) -> Version | None:
    """The version that a log shows, or that is installed here, if the failure's files lie here."""
    here = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    told = log.versions.get(package)
    if told is None and any(frame.startswith(here) for frame in root.frames):
        with suppress(PackageNotFoundError):
            told = installed_version(package)
    with suppress(InvalidVersion):
        return Version(told) if told else None
    return None


# ------------------------------------------------------------------------------------------ what is said of it


def _finding(
    found: Missing, bounds: Bounds, version: Version | None, failure: Traceback, log: Log
) -> Finding:
    kind = "api-came-later" if bounds.until is None or (version and bounds.since) else "api-between"
    kind = "api-is-gone" if bounds.since is None else "api-returned" if bounds.again else kind
    package = found.table.package
    values: dict[str, object] = {
        "name": found.name,
        "package": package,
        "since": bounds.shown,
        "until": bounds.until or bounds.last,
        "last": bounds.last,
        "again": bounds.again or "",
        "version": version or "",
        "pin": f"{package}{bounds.specifier}",
        "yours": words("yours-is", package=package, version=version) if version else words("yours-unknown"),
        "instead": _instead(found, failure),
    }
    certainty = (
        "sure" if version else "likely" if kind != "api-between" and not found.of_object else "possible"
    )
    return _told(kind, values, certainty, found.table, failure, log)


def _clash(name: str, failure: Traceback, log: Log) -> Finding | None:
    """A type of model that transformers has itself now, and another package registers once more."""
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
    place = Place(log.name, failure.last, clipped(failure.said.split("\n")[0], 300))
    finding = told(kind, [place], values, certainty=certainty, evidence=[read_from(found)])
    return replace(finding, remedy=filled_in(finding.remedy, failure, log))


def read_from(found: Table) -> Text:
    """Which releases the table was made of, and when."""
    return words(
        "history-read",
        package=found.package,
        first=found.versions[0],
        last=found.versions[-1],
        date=found.date,
    )


def _instead(found: Missing, failure: Traceback) -> Text:
    """What to write, or which package to update, in place of going back to an old release."""
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
    return words("write-instead", new=found.instead) if found.instead else words("go-back")


def _who_dropped(found: Missing) -> str | None:
    """The one package that imported a name and does not any more, where a log does not say who asks."""
    asking = [own.package for own in tables(ROOTS) if found.target and own.dropped(found.target)]
    return asking[0] if len(asking) == 1 else None


def _package_of(frame: str) -> str | None:
    """The package of the history that a frame's file lies in."""
    match = _SITE.search(frame)
    return PACKAGES.get(match["root"]) if match else None
