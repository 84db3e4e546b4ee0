"""Why pip or uv found no compatible versions: requirements of one package that exclude each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from packaging.utils import canonicalize_name

from reshard.diagnosis.finding import Finding, Place, Text
from reshard.diagnosis.history.table import PACKAGES, ROOTS
from reshard.diagnosis.installing import installed_for
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.reading import clipped
from reshard.diagnosis.rules import told, told_at
from reshard.diagnosis.words import words

_FAILED = re.compile(
    r"ResolutionImpossible|have conflicting dependencies|No solution found when resolving"
    r"|your requirements (?:and .{1,200} )?are (?:incompatible|unsatisfiable)"
)
_SPEC = (
    r"(?<![\w.-])[A-Za-z][\w.-]{0,80}(?:\[[\w,.-]{0,80}\])?[ (]{0,2}"
    r"(?:[<>=!~]=?=?[^\s,;)<>=!~]{1,40},?){0,6}"
)
_PIP = re.compile(
    rf"^[ \t]{{0,40}}(?P<who>[A-Za-z][\w.-]{{0,80}}(?:\[\S{{0,80}}\])? \S{{1,60}}) depends on (?P<what>{_SPEC})",
    re.MULTILINE,
)
_ASKED = re.compile(rf"^[ \t]{{0,40}}The user requested (?:\(constraint\) )?(?P<what>{_SPEC})", re.MULTILINE)
_UV = re.compile(
    rf"(?P<who>\byou\b|{_SPEC})\s(?:depends? on|requires?)\s(?P<what>{_SPEC})"
    rf"(?:\sand\s(?!you\b)(?P<also>{_SPEC})(?!\s(?:depend|require)))?"
)
_TAG = re.compile(
    r"(?:\bonly (?P<name>[A-Za-z][\w-]{0,60})[\w.<>=!~+,]{0,60}|(?P<what>[A-Za-z][\w.-]{0,60}"
    r"(?:[<>=!~]=?[\w.+]{1,30},?){0,3})) (?:has|have)(?: no)? wheels with a matching"
    r" (?P<kind>Python|platform)(?: ABI| version| implementation)? tag"
)
"""uv on a package whose wheels do not fit the interpreter or the machine."""
YOU = "you"


class Need(NamedTuple):
    """A requirement (`torch==2.6.0`), and its origin: a package with its version, or the user."""

    who: str
    what: str

    @property
    def package(self) -> str:
        """The required package."""
        name = re.match(r"[A-Za-z][\w.-]*", self.what)
        return canonicalize_name(name[0]) if name else ""


def of_resolver(root: Traceback, log: Log) -> Finding | None:
    """The requirements that exclude each other, as the resolver lists them; None if the log has no resolver failure."""
    line = next((line for line in log.lines if _FAILED.search(line.text)), None)
    if line is None:
        return None
    if tag := _TAG.search(re.sub(r"\s+", " ", log.text)):
        rule = "wheels-of-other-platform" if tag["kind"] == "platform" else "wheels-of-other-python"
        return told_at((rule, {"what": tag["what"] or tag["name"]}), log.name, line.number, line.text)
    needs = list(dict.fromkeys(_needs(log.text)))
    by_package: dict[str, list[Need]] = {}
    for need in needs:
        by_package.setdefault(need.package, []).append(need)
    clash = max(by_package.values(), key=lambda same: len({each.what for each in same}), default=[])
    if len({each.what for each in clash}) < 2:
        return None
    package = clash[0].package
    shown = "\n".join(f"  {each.who}: {each.what}" for each in clash[:MOST])
    asked = sorted({_name(each.who) for each in clash if each.who != YOU})
    values = {"package": package, "needs": Text.same(shown), "command": _command(package, asked)}
    place = Place(log.name, line.number, clipped(line.text.strip(), 300))
    return told("requirements-conflict", [place], values, certainty="likely")


_REQUIRED = tuple(
    re.compile(pattern)
    for pattern in (
        r"The '(?P<spec>[A-Za-z][\w.-]{0,60}[<>=!~][^'\s]{1,60})' distribution was not found"
        r"(?: and is required by (?P<who>[\w.-]{1,60}))?",
        r"Requirement\.parse\('(?P<spec>[A-Za-z][\w.-]{0,60}[<>=!~][^'\s]{1,60})'\)(?:, \{'(?P<who>[\w.-]{1,60})'\})?",
        r"(?i:requires?) (?P<package>[A-Za-z][\w-]{0,60}) (?:package )?version (?P<range>[<>=!~]{1,2} ?\d[\w.]*"
        r"(?:, ?[<>=!~]{1,2} ?\d[\w.]*\w)*)(?P<spec>)(?P<who>)",
        r"\b(?i:requires?|need|needs|install(?:ed)?|upgrade|update)\b[^.\n]{0,60}?"
        r"(?<![\w.-])(?P<spec>[A-Za-z][\w-]{0,60}(?:>=|==|~=|<=|<|>)\d[\w.]{0,20}(?:,[<>=!~]{1,2}\d[\w.]{0,20}){0,3})(?P<who>)",
    )
)
_KNOWN = "|".join(
    sorted(
        {*ROOTS, *ROOTS.values(), "pytorch", "ray", "torchao", "torchvision", "openai"}, key=len, reverse=True
    )
)
_LEAST = r"v?(?P<least>\d+(?:\.\d+){1,3}(?:\.?(?:dev|rc|post)\d+)?)"
_NAMED = rf"(?<![\w./-])(?P<package>{_KNOWN})[`'\"]?"
_IN_WORDS = tuple(
    re.compile(rf"(?i){pattern}")
    for pattern in (
        rf"(?:upgrad|updat)\w{{1,4}} (?:your )?{_NAMED} to (?:at least )?(?:version )?{_LEAST}",
        rf"{_NAMED} (?:version )?(?:(?:must|should|has to) be |of )?(?:at least|>=|≥) ?{_LEAST}",
        rf"{_NAMED} (?:package )?version to be (?:greater (?:than )?or equal|at least|higher)(?: than| to)? {_LEAST}",
        rf"{_NAMED} (?:version )?(?:>=|≥)? ?{_LEAST} (?:or|and) (?:newer|later|higher|above|greater|up)\b",
    )
)
"""The same in prose, about packages that are known: their names are words of other sentences too."""
_FOUND = re.compile(
    r"(?i:but got|detected(?: version)?|found(?: version)?|installed(?: version)?(?: is)?|you have):? v?"
    r"(?P<has>\d+\.\d[\w.+]*\w)"
)
"""The release that a message says is there."""
_NO_PACKAGE = re.compile(r"(?i:python|cuda|gcc|glibc|driver|nvcc|rocm)\W")


def of_requirement(root: Traceback, log: Log) -> Finding | None:
    """The release of a package that a failure requires; None if it names none."""
    match = next((hit for pattern in _REQUIRED if (hit := pattern.search(root.said))), None)
    if match is None or _NO_PACKAGE.match(match["spec"]):
        told_in = next((hit for pattern in _IN_WORDS if (hit := pattern.search(root.said))), None)
        if told_in is None:
            return None
        package = told_in["package"].lower()
        spec, who = (
            f"{PACKAGES.get(package, 'torch' if package == 'pytorch' else package)}>={told_in['least']}",
            None,
        )
    else:
        spec, who = match["spec"].rstrip("."), match["who"]
        if "range" in (given := match.groupdict()) and given["range"]:
            spec = f"{_published(given['package'])}{given['range'].replace(' ', '')}".rstrip(".")
    values: dict[str, object] = {"spec": spec, "package": re.split(r"[<>=!~]", spec)[0]}
    values["what"] = words("required-by", spec=spec, who=who) if who else words("required", spec=spec)
    has = _FOUND.search(root.said)
    values["what"] = words("and-found", what=values["what"], has=has["has"]) if has else values["what"]
    ways = installed_for(str(values["package"]).replace("-", "_")).split()
    values["flags"] = "".join(f"{each} " for each in ways if each.startswith("--"))
    values["newer"] = words("or-newer", who=who) if who else Text.same("")
    return told_at(("version-required", values), log.name, root.last, root.said)


def _published(name: str) -> str:
    """What pip calls a package that a message names in words."""
    plain = name.lower().replace("_", "-")
    return {"flash-attention": "flash-attn", "pytorch": "torch"}.get(plain, plain)


MOST = 8
"""Maximum requirements that are shown."""


def _needs(text: str) -> Iterator[Need]:
    joined = re.sub(r"\n[ \t]{4,80}(?=\S)", " ", text) if "we can conclude" in text else text
    for match in _PIP.finditer(text):
        yield Need(match["who"], _plain(match["what"]))
    for match in _ASKED.finditer(text):
        yield Need(YOU, _plain(match["what"]))
    for match in _UV.finditer(joined) if "we can conclude" in text else ():
        for what in (match["what"], match["also"]):
            if what:
                yield Need(YOU if match["who"] == YOU else _plain(match["who"]), _plain(what))


def _plain(what: str) -> str:
    return re.sub(r"[\s()]+", "", what).rstrip(",.")


def _name(who: str) -> str:
    match = re.match(r"[A-Za-z][\w.-]*", who)
    return match[0] if match else who


def _command(package: str, asked: list[str]) -> Text:
    """A command that installs all of the packages, none of them pinned."""
    return Text.same(" ".join(["python -m pip install -U", *dict.fromkeys([*asked, package])]))
