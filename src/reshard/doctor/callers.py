"""Calls that do not fit what they call, and values that a line of code counted on: in the words of Python itself.

Who calls and what is called were written for different releases, or the data (a batch, a list) is not what they expect.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from reshard.doctor.finding import Finding, Place, Text
from reshard.doctor.history.table import tables
from reshard.doctor.log import Log, Traceback
from reshard.doctor.pythons import place_in_code
from reshard.doctor.reading import clipped
from reshard.doctor.rules import told
from reshard.doctor.upstream import package_of
from reshard.doctor.words import words

Told = tuple[str, dict[str, object]]
"""The id of a rule, and what fills its braces."""


def of_call(root: Traceback, log: Log) -> Finding | None:
    """What a call or a line of code counted on; None for an exception of another kind."""
    first = root.root
    found = next((each for ask in _ASKED if (each := ask(first))), None)
    if found is None:
        return None
    place = Place(log.name, first.last, clipped(first.said.split("\n")[0], 300))
    values = {"where": place_in_code(first), "update": _update(first), **found[1]}
    return told(found[0], [place], values, certainty="likely")


def _update(root: Traceback) -> Text:
    package = package_of(root.frames[-1]) if root.frames else None
    return words("update-asker", package=package) if package else words("update-both")


_MISSING = re.compile(
    r"TypeError: (?P<function>[\w.<>]+)\(\) missing (?P<count>\d+) required (?:positional"
    r"|keyword-only) arguments?: (?P<names>[^\n]+)"
)
_COUNT = re.compile(
    r"TypeError: (?P<function>[\w.<>]+)\(\) (?P<what>takes (?:from \d+ to "
    r"|exactly )?\d+ (?:positional )?arguments? (?:but \d+ (?:was|were) given|\(\d+ given\))"
    r"|got multiple values for (?:keyword )?argument '\w+')"
)
_UNPACK = re.compile(
    r"ValueError: (?P<what>(?:too many|not enough) values to unpack \((?:expected (?:at least )?\d+(?:, got \d+)?)\))"
)


def _missing(root: Traceback) -> Told | None:
    match = _MISSING.match(root.said)
    if match is None:
        return None
    of_model = match["function"].rpartition(".")[2] in ("forward", "compute_loss", "_forward")
    return ("batch-lacks" if of_model else "call-lacks"), {
        "function": match["function"],
        "names": match["names"],
    }


def _count(root: Traceback) -> Told | None:
    match = _COUNT.match(root.said)
    return ("call-differs", {"function": match["function"], "what": match["what"]}) if match else None


def _unpack(root: Traceback) -> Told | None:
    match = _UNPACK.match(root.said)
    return ("unpack-differs", {"what": match["what"]}) if match else None


_NAME = re.compile(r"NameError: (?:free variable|global name|name) '(?P<name>\w+)' ")


def _undefined(root: Traceback) -> Told | None:
    match = _NAME.match(root.said)
    if match is None:
        return None
    own = package_of(root.frames[-1]) if root.frames else None
    known = [each for each in tables(_EXPORT) if each.name(each.raw["root"], match["name"]).there]
    other = next((each.package for each in known if each.raw["root"] != own), None)
    if other:
        return "name-of-optional", {"name": match["name"], "other": other}
    return "name-undefined", {"name": match["name"]}


_EXPORT = (
    "accelerate",
    "peft",
    "bitsandbytes",
    "deepspeed",
    "flash-attn",
    "torch",
    "transformers",
    "datasets",
)
"""Packages that others import only where they are installed."""

_BEYOND = re.compile(
    r"IndexError: (?P<what>(?:list|tuple|string|index|pop)[^\n]{0,60}(?:out of range|empty list))"
)
_ZERO = re.compile(r"ZeroDivisionError: (?P<what>[^\n]+)")
_UNBOUND = re.compile(
    r"UnboundLocalError: (?:local variable '(?P<name>\w+)' referenced before assignment"
    r"|cannot access local variable '(?P<other>\w+)')"
)


def _empty(root: Traceback) -> Told | None:
    if match := _BEYOND.match(root.said):
        return "index-beyond", {"what": match["what"]}
    if _ZERO.match(root.said):
        return "count-is-zero", {}
    if match := _UNBOUND.match(root.said):
        return "never-assigned", {"name": match["name"] or match["other"]}
    return None


_OLD = re.compile(
    r"TypeError: (?:unsupported operand type\(s\) for \|: '(?:type|_?GenericAlias|\w*Meta|NoneType)' and '[\w.]+'"
    r"|'(?:type|ABCMeta|function)' object is not subscriptable)|SyntaxError: (?:invalid syntax|f-string: )"
)


def _python(root: Traceback) -> Told | None:
    if not _OLD.match(root.said):
        return None
    version = next((hit[1] for frame in root.frames if (hit := re.search(r"python(3\.\d+)", frame))), "")
    return "python-too-old", {"version": Text(f" {version}", f" {version}") if version else Text.same("")}


_DENIED = re.compile(
    r"(?:PermissionError|OSError): \[Errno (?P<number>13|30|1)\] (?P<what>Permission denied"
    r"|Read-only file system|Operation not permitted)(?:: ['\"](?P<path>[^'\"\n]+))?"
)


def _denied(root: Traceback) -> Told | None:
    match = _DENIED.match(root.said)
    return ("path-denied", {"what": match["what"], "path": match["path"] or "?"}) if match else None


_ASKED: tuple[Callable[[Traceback], Told | None], ...] = (
    *(_missing, _count, _unpack, _undefined, _empty, _python, _denied),
)
