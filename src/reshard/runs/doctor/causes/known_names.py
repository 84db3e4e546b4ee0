"""What the tables know of a missing name: in which releases of which package it exists, and what replaces it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from packaging.version import Version

from reshard.base.languages import Text
from reshard.runs.checks.history.api_table import PACKAGE_ROOTS, REPLACED_NAMES, ApiTable, table_of, tables
from reshard.runs.checks.history.bloom_filters import packages_with
from reshard.runs.checks.history.call_parameters import base_of
from reshard.runs.checks.history.release_ranges import Bounds, Presence
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.causes.missing_names import Missing, MissingKind, checkout_of, is_shadowed
from reshard.runs.doctor.frame_packages import package_of
from reshard.runs.doctor.text.log import Log, Traceback


@dataclass(frozen=True)
class KnownName:
    """The releases that have what is missing. `spelling` is how people write it, `instead` what replaces it."""

    missing: Missing
    table: ApiTable
    presence: Presence
    spelling: str | Text
    instead: str | None = None
    wider: Presence | None = None
    """When a parameter is also accepted by decorators and `**`."""

    def bounds(self, version: Version | None) -> Bounds | None:
        """The releases that have it, relative to one that does not."""
        wider = self.wider.bounds(version) if self.wider and version else None
        return wider or self.presence.bounds(version)


def known_of(missing: Missing, failure: Traceback, log: Log) -> KnownName | None:
    """What the tables know of a missing name; None if no table can have it. The presence may be empty."""
    match missing.kind:
        case MissingKind.IMPORT | MissingKind.NAME:
            return _of_name(missing)
        case MissingKind.MODULE:
            return _of_module(missing)
        case MissingKind.MODEL_TYPE | MissingKind.ARCHITECTURE:
            return _of_key(missing)
        case MissingKind.ATTRIBUTE:
            return _of_attribute(missing, failure, log)
        case _:
            return _of_call(missing, failure, log)


def _of_name(missing: Missing) -> KnownName | None:
    own = table_of(missing.owner)
    if missing.root == "numpy" and missing.name.startswith("_"):
        return None  # only numpy itself imports it: part of it was replaced while it was in memory
    is_folder = is_shadowed(missing.path) and not ("." in missing.owner and checkout_of(missing))
    if own is None or is_folder:
        return None
    moved = own.moved(missing.owner, missing.name)
    instead = f"from {moved} import {missing.name}" if moved else None
    presence = own.name(missing.owner, missing.name)
    return KnownName(missing, own, presence, missing.whole, REPLACED_NAMES.get(missing.whole) or instead)


def _of_module(missing: Missing) -> KnownName | None:
    own = table_of(missing.owner)
    if own is None:
        return None
    moved = own.module_moved(missing.owner)
    presence = own.module(missing.owner)
    return KnownName(missing, own, presence, missing.owner, f"import {moved}" if moved else None)


def _of_key(missing: Missing) -> KnownName | None:
    own = table_of(missing.owner)
    name = f"model_type {missing.name}" if missing.kind is MissingKind.MODEL_TYPE else missing.name
    return KnownName(missing, own, own.key(missing.name), name) if own else None


# ------------------------------------------------------------------------------------------ in any package


def _of_attribute(missing: Missing, failure: Traceback, log: Log) -> KnownName | None:
    kind, name = missing.owner, missing.name

    def ask(own: ApiTable) -> KnownName:
        return KnownName(missing, own, own.attribute(kind, name), missing.whole)

    known = _wherever(ask, (kind, f".{name}"), failure, log)
    return known or (None if kind == "NoneType" else _inherited(missing))


def _inherited(missing: Missing) -> KnownName | None:
    """An attribute that a class inherits from a base in any package, or finds in the object that it wraps."""
    kind, name = missing.owner, missing.name
    bases = {base for own in tables(packages_with(PACKAGE_ROOTS, kind)) for base in own.ancestors(kind)}
    bases |= {*re.findall(r"(?<=\w)[A-Z][a-z]+$", kind)}  # MyOwnTrainer is a Trainer
    bases |= {"LoraModel"} if kind.startswith("PeftModel") else set()
    inherited = {}
    for base in sorted(bases):
        for own in tables(packages_with(PACKAGE_ROOTS, base, f".{name}")):
            presence = own.attribute(base, name)
            if presence.there and not own.has_class(kind):
                inherited[own.package] = KnownName(missing, own, presence, f"{base}.{name}")
    return next(iter(inherited.values())) if len(inherited) == 1 else None


def _of_call(missing: Missing, failure: Traceback, log: Log) -> KnownName | None:
    """A parameter of a function of a package other than the one that calls it.

    One release knows its own functions, so what it calls with an unknown keyword is somebody's override. Keywords that
    it only passes on, or has from a file, may be another release's.
    """
    function = missing.owner
    spelling = function.removesuffix(".__init__")

    def ask(own: ApiTable) -> KnownName:
        if missing.kind is MissingKind.KEYWORD:
            return _taken(missing, own)
        more = phrase_text("more-arguments", function=spelling, count=missing.count)
        return KnownName(missing, own, own.arity(function, missing.count), more)

    known = _wherever(ask, (spelling,), failure, log, spelling if missing.kind is MissingKind.KEYWORD else "")
    caller = package_of(failure.frames[-1]) if failure.frames else None
    is_own = known is not None and known.table.root == caller
    passes_on = function.endswith(".__init__") and _PASSES_ON.search(failure.source)
    return None if is_own and not passes_on else known


_PASSES_ON = re.compile(r"\*\*|\b\w+(?:Args|Arguments|Config)\($")
"""A call with keywords from elsewhere, or the first line of one that makes a config."""


def _taken(missing: Missing, own: ApiTable) -> KnownName:
    """A parameter of a function, or of its class's bases in other packages."""
    function, name = missing.owner, missing.name
    holder, target = own, function
    for base in map(base_of, own.marked(function)):
        if base and not own.own_parameter(function, name).there:
            holder, target = base
    new = own.renames.get(name) or holder.renames.get(name)
    kind = function.removesuffix(".__init__")
    instead = _in_config(own, kind, new or name) or (f"{new}=…" if new else None)
    presence, wider = holder.own_parameter(target, name), holder.parameter(target, name)
    return KnownName(missing, holder, presence, f"{kind}({name}=…)", instead, wider)


def _in_config(own: ApiTable, kind: str, name: str) -> str | None:
    """How the config of a trainer takes a parameter that the trainer itself no longer takes; None if it does not."""
    config = re.sub(r"Trainer$", "Config", kind)
    takes = config != kind and own.last in own.own_parameter(f"{config}.__init__", name).there
    return f'{kind}(..., args={config}(output_dir="OUT", {name}=…))' if takes else None


def _wherever(
    ask: Callable[[ApiTable], KnownName], names: tuple[str, ...], failure: Traceback, log: Log, kind: str = ""
) -> KnownName | None:
    """What only one package has: among those that the failure mentions, or among all if none of these has it.

    Only packages are asked that may have all of `names`. If several have it, the one counts from whose root the class
    `kind` is imported.
    """
    mentioned = _mentioned(failure, log)
    others = [package for package in PACKAGE_ROOTS if package not in {*mentioned, *_PROGRAMS}]
    for packages in (mentioned, others):
        having = [each for each in map(ask, tables(packages_with(packages, *names))) if each.presence.there]
        known = list({each.table.package: each for each in having}.values())  # by the package of a base
        if len(known) > 1 and kind:
            known = [each for each in known if each.table.name(each.table.root, kind).there]
        if having:
            return known[0] if len(known) == 1 else None
    return None


_PROGRAMS = ("llamafactory", "ms-swift")
"""Packages whose classes are called only by themselves: a failure in one mentions it."""


def _mentioned(failure: Traceback, log: Log) -> list[str]:
    """Packages whose files or names appear in the failure's own lines."""
    lines = [line.text for line in log.lines if failure.first <= line.number <= failure.end]
    text = "\n".join([*failure.frames, failure.error_text, *lines])
    return [
        package for package, name in PACKAGE_ROOTS.items() if re.search(rf"(?<![\w-]){name}(?![\w-])", text)
    ]
