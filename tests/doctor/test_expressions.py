"""No regular expression of the doctor takes long for any line, hostile or minified."""

from __future__ import annotations

import ast
import pkgutil
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from inspect import getsource
from types import ModuleType
from typing import Any

import pytest

from reshard.runs.doctor.causes.message_rules import message_rules
from reshard.runs.doctor.entries.catalogue_entry import catalogue
from reshard.runs.doctor.remedy_spelling import tool_patterns
from reshard.runs.doctor.text.text_files import MAX_LINE

if sys.version_info >= (3, 11):
    from re import _parser as parser
else:
    import sre_parse as parser

PACKAGE = import_module("reshard.runs.doctor")
METHODS = [
    f"re.{name}"
    for name in ("compile", "search", "match", "fullmatch", "finditer", "findall", "sub", "split")
]
AT_BEGINNING = {"reshard.runs.doctor.text.tracebacks._FRAMES"}
"""Containers whose expressions are only tried at the beginning of a line."""
OWN = {"reshard.runs.doctor.entries.catalogue_entry._PARTS"}
"""Only matched against reshard's own texts."""
ENDLESS = 2.0
QUICK = 0.4
"""Seconds that no line may take when its length doubles, unless the time grows linearly."""
TRIES = 8
"""The least of as many durations counts: other work on the machine only ever adds to them."""
GENERAL = [
    *"a0_é \t\n./\\()[{<\"'`:=-+|#*^",
    *(
        " \n",
        "a\n",
        "│ ",
        "\x1b[",
        "\x1b]",
        "a ",
        "a.",
        "Ab.",
        "1.",
        "1: ",
        "a/",
        '"a",',
        '{"k":1},',
        "QUJD0/+9",
    ),
    *('File "', 'File \\"', "Error: ", "(AError: ", "Traceback (most recent call last)"),
]


def sample(pattern: re.Pattern[str], choice: int) -> str:
    """A text that nearly matches: each part of the expression as few times as allowed, and at least once.

    Among alternatives, number `choice` is taken.
    """

    def of(parts: Any) -> str:
        return "".join(one(*part) for part in parts)

    def one(operation: Any, given: Any) -> str:
        name = str(operation)
        if name == "LITERAL":
            return chr(given)
        if name == "IN":
            return one(*given[0]) if str(given[0][0]) != "NEGATE" else "x"
        if name == "RANGE":
            return chr(given[0])
        if name == "CATEGORY":
            return {"CATEGORY_DIGIT": "0", "CATEGORY_SPACE": " "}.get(str(given), "x")
        if name == "BRANCH":
            return of(given[1][choice % len(given[1])])
        if name == "SUBPATTERN":
            return of(given[-1])
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            return of(given[2]) * max(1, given[0])
        return "" if name in ("AT", "ASSERT", "ASSERT_NOT", "GROUPREF") else "x"

    return of(parser.parse(pattern.pattern, pattern.flags))


def units(pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Prefixes of adversarial lines, and the parts that they repeat."""
    yield from (("", unit) for unit in GENERAL)
    samples = {sample(pattern, choice) for choice in range(min(20, 1 + pattern.pattern.count("|")))}
    parts = 8 if len(samples) == 1 else 4
    for near in sorted(samples):
        ends = {len(near) * part // parts for part in range(1, parts + 1)} | {len(near) - 1}
        for end in sorted(end for end in ends if end > 0):
            yield "", near[:end]
            yield "", near[:end] + " "
            for unit in (" ", "a", "0", near[end - 1]):
                yield near[:end], unit


def line(begin: str, unit: str, length: int) -> str:
    return begin + unit * (length // len(unit)) + "!"


def expressions() -> Iterator[tuple[str, re.Pattern[str], str]]:
    """All expressions of the engine and the catalogue by name, and the method that each is used with."""
    for info in pkgutil.walk_packages(PACKAGE.__path__, "reshard.runs.doctor."):
        module = import_module(info.name)
        for name, value in vars(module).items():
            for path, pattern in patterns_in(f"{info.name}.{name}", value):
                yield path, pattern, method_of(module, name)
        yield from written_in(module)
    for entry in catalogue().values():
        for path, pattern in patterns_in(entry.id, [entry.patterns, entry.needs, entry.unless, entry.hints]):
            yield path, pattern, "search"
    for rule in message_rules():
        for pattern in (rule.pattern, rule.needs, rule.unless):
            yield rule.code, re.compile(pattern, re.ASCII), "search"
    for path, pattern in patterns_in("data", tool_patterns()):
        yield path, pattern, "search"


def patterns_in(name: str, value: Any) -> Iterator[tuple[str, re.Pattern[str]]]:
    if isinstance(value, re.Pattern):
        yield name, value
    elif isinstance(value, (list, tuple, set, frozenset)):
        for at, each in enumerate(value):
            yield from patterns_in(f"{name}[{at}]", each)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from patterns_in(f"{name}[{key}]", each)


def method_of(module: ModuleType, name: str) -> str:
    """How a module uses an expression: anywhere in a text, unless only at its beginning."""
    called = {
        node.func.attr
        for node in ast.walk(ast.parse(getsource(module)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == name
    }  # fmt: skip
    at_beginning = called == {"match"} or f"{module.__name__}.{name}" in AT_BEGINNING
    return "match" if at_beginning else "search"


def written_in(module: ModuleType) -> Iterator[tuple[str, re.Pattern[str], str]]:
    """Expressions inside the functions that use them: `re.search("…", text)`."""
    nodes = ast.walk(ast.parse(getsource(module)))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    for node in (node for function in functions for node in ast.walk(function)):
        method = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if method in METHODS and isinstance(node.args[0], ast.Constant):
            flags = re.MULTILINE if "re.MULTILINE" in ast.unparse(node) else re.RegexFlag(0)
            used = method[3:] if method in ("re.match", "re.fullmatch") else "search"
            yield f"{module.__name__}:{node.lineno}", re.compile(node.args[0].value, flags), used


def seconds(search: Callable[[str], object], text: str) -> float:
    """The duration of a search in seconds of processor time (the machine runs other work, too): at most `ENDLESS`."""
    begin = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, ENDLESS)
    with suppress(TimeoutError):
        search(text)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return time.process_time() - begin


@pytest.fixture(autouse=True)
def _timer() -> Iterator[None]:
    def ends(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, ends)
    yield
    signal.signal(signal.SIGPROF, before)


def slow_line(search: Callable[[str], object], pattern: re.Pattern[str]) -> str:
    """The first line that takes too long; "" if there is none."""
    for begin, unit in units(pattern):
        if seconds(search, line(begin, unit, MAX_LINE // 4)) < QUICK / 8 / 4**3:
            continue  # twice the longest line is quick, too, were the search cubic
        once = twice = float("inf")
        for _ in range(TRIES):
            once = min(once, seconds(search, line(begin, unit, MAX_LINE)))
            if once <= QUICK / 8:
                break
            twice = min(twice, seconds(search, line(begin, unit, 2 * MAX_LINE)))
            if twice <= QUICK or twice <= min(3 * once, ENDLESS / 2):
                break
        else:
            return f"{begin!r}, {unit!r} … take {once:.3f} s, and twice the line {twice:.3f} s"
    return ""


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(4))
def test_no_expression_takes_long_for_any_line(part: int) -> None:
    every = [each for each in expressions() if each[0] not in OWN]
    assert len(every) > 700
    repeat = [each for each in every if set("*+{") & set(each[1].pattern)]
    slow = [
        f"{name}, {method}: {line}\n  {pattern.pattern}"
        for name, pattern, method in repeat[part::4]
        if (line := slow_line(getattr(pattern, method), pattern))
    ]
    assert not slow, "\n".join(slow)
