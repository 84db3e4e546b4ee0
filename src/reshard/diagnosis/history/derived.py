"""The user's classes derived from known ones: the class whose attributes they lack, and in which releases."""

from __future__ import annotations

import re

from reshard.diagnosis.finding import Finding, Place
from reshard.diagnosis.history.messages import read_from
from reshard.diagnosis.history.missing import MEMBER
from reshard.diagnosis.history.table import ROOTS, Presence, Span, Table, tables
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import told
from reshard.diagnosis.upstream import asker, package_of
from reshard.diagnosis.words import words

_PARTS = re.compile(r"[A-Z]{1,12}(?=[A-Z][a-z]|$)|[A-Z][a-z0-9]{1,30}")
DERIVED_FROM = ("trl", "transformers", "accelerate", "peft")
"""Packages from whose classes users derive."""


def of_derived(root: Traceback, log: Log) -> Finding | None:
    """The finding that an attribute belongs to a related class: to the base of this one, or to a derived class."""
    match = MEMBER.search(root.said)
    if match is None:
        return None
    if any(match["kind"] in own.raw["attributes"] for own in tables(ROOTS)):
        return _of_heirs(match["kind"], match["name"], root, log)
    found = _base_of(match["kind"], match["name"])
    return _of_base(match["kind"], match["name"], *found, root, log) if found else None


def _of_base(
    kind: str, name: str, base: str, presence: Presence, root: Traceback, log: Log
) -> Finding | None:
    """The finding that a user's class lacks what the class it is named after has only in some releases."""
    own, there = presence.table, presence.there
    if len(there) == len(own.versions):
        return None
    since, last, frame = own.versions[min(there)], own.versions[max(there)], asker(root)
    pins = {
        "derived-base-asks": own.package + _without(own, base, there),
        "derived-asks": own.package + _between(own, min(there), max(there)),
    }
    way = "derived-base-asks" if package_of(frame) else "derived-asks" if frame else "derived-either"
    pins["derived-either"] = pins["derived-asks"]
    values: dict[str, object] = {"kind": kind, "name": name, "base": base, "package": own.package}
    values |= {"since": since, "last": last, "pin": pins[way]}
    values["way"] = words(way, package=own.package, without=pins["derived-base-asks"])
    sure = "likely" if frame else "possible"
    return told(
        "attribute-of-derived", [_place(root, log)], values, certainty=sure, evidence=[read_from(own)]
    )


def _without(own: Table, base: str, there: Span) -> str:
    """The releases before the last with an attribute in which a class exists, but has no such attribute."""
    having = own.name(own.raw["root"], base).there
    if not having or min(having) < min(there):
        return f"<{own.versions[min(there)]}"
    lacking = [at for at in sorted(having - there) if at < max(there)]
    first = next((at for at in lacking[::-1] if at - 1 not in lacking), None)
    return "" if first is None else _between(own, first, max(lacking))


def _between(own: Table, first: int, last: int) -> str:
    """The specifier of some releases in a row."""
    until = f",<{own.versions[last + 1]}" if last < own.last else ""
    return f">={own.versions[first]}{until}"


USUAL = ("SFTConfig", "DPOConfig", "GRPOConfig", "RewardConfig")
"""Configs of trainers, the most used first."""


def _of_heirs(kind: str, name: str, root: Traceback, log: Log) -> Finding | None:
    """The finding that a class was passed where a derived class with the attribute is needed."""
    if any(own.attribute(kind, name).there for own in tables(ROOTS)):
        return None
    for own in tables(DERIVED_FROM):
        derived = [each for each in own.raw["attributes"] if each != kind and kind in own.ancestors(each)]
        having = {each: own.attribute(each, name).there | _taken(own, each, name) for each in derived}
        having = {each: there for each, there in having.items() if there}
        if having:
            named = sorted(having, key=lambda each: (min(having[each]), len(each)))
            first = own.versions[min(having[named[0]])]
            heirs = ", ".join(sorted(named, key=lambda each: each not in USUAL)[:4])
            first_ones = [each for each in named if not own.ancestors(each) & having.keys()]
            meant = [each for each in named if _is_of_trainer(each, log.text)] or first_ones
            one = meant[0] if len(meant) == 1 else None
            usual = next((each for each in USUAL if each in having), "XConfig")
            values: dict[str, object] = {"kind": kind, "name": name, "package": own.package, "heirs": heirs}
            values |= {"heir": one or usual, "first": first}
            values["needed"] = one or words("config-of-trainer", heirs=heirs)
            return told(
                "attribute-of-heir",
                [_place(root, log)],
                values,
                certainty="likely",
                evidence=[read_from(own)],
            )
    return None


def _is_of_trainer(config: str, text: str) -> bool:
    """Whether a log names the class that takes a config, or its file: GRPOTrainer takes a GRPOConfig."""
    stem = re.sub(r"(?:Config|Arguments)$", "", config)
    return f"{stem}Trainer" in text or f"/{stem.lower()}_trainer.py" in text


def _taken(own: Table, kind: str, name: str) -> Span:
    """When the constructor of a class takes a parameter: each field of a dataclass is one."""
    return own.own_parameter(f"{kind}.__init__", name).there


def _place(root: Traceback, log: Log) -> Place:
    return Place.of(log.name, root.last, root.said)


def _is_named_after(kind: str, base: str, own: Table) -> bool:
    """Whether the words of a class's name are all in another name, in order; a single one has to be its end."""
    parts = _PARTS.findall(base)
    if len(parts) == 1:
        return kind.endswith(base) and bool(own.name(own.raw["root"], base).there)
    return bool(parts and re.search(".*".join(map(re.escape, parts)), kind))


def _base_of(kind: str, name: str) -> tuple[str, Presence] | None:
    """The class with the attribute whose name's words are all in the other name, in order; the longest such class."""
    found: dict[str, Presence] = {}
    for own in tables(DERIVED_FROM):
        for base in own.raw["attributes"]:
            if base != kind and _is_named_after(kind, base, own):
                presence = own.attribute(base, name)
                if presence.there and base not in found:
                    found[base] = presence
    base = max(found, key=len, default="")
    return (base, found[base]) if base else None
