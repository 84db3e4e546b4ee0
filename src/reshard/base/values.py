"""Kinds of values: how one is read from a command line, which ones Python may pass, and what is expected, in words.

Each option has one kind, which its annotation chooses (`base/options.py`). The command line (`cli/value_type.py`) and
Python functions (`base/arguments.py`) use the same one.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from reshard.base.errors import ReshardError

StrPath = str | PathLike[str]
LocalPath = str | Path | PathLike[str]
"""A path on this machine."""
OnBytes = Callable[[int], None]
"""Callback that receives the number of bytes just completed."""

MAX_COUNT = 2**31 - 1
"""The largest number of ranks, threads, rows and the like: frameworks keep most of them in 32 bits."""


@dataclass(frozen=True)
class Kind:
    """A kind of values."""

    title: str
    """The type, as the documentation of a function has it."""
    expected: str
    """What such a value is, in words."""
    accepts: Callable[[Any], bool]
    """Whether an object of Python is such a value."""
    parse: Callable[[str], Any] = lambda text: text
    """The object of Python that a text of a command line means. May raise ValueError."""
    convert: Callable[[Any], Any] = lambda value: value
    """What the program uses in place of a value. May raise ReshardError, which says more than `expected`."""
    listed: Callable[[], Iterable[str]] = tuple
    """Returns the words that it takes, if there is a list of them; some lists are long in the making."""
    element: Kind | None = None
    """The kind of each of several values that a command line has one by one."""
    is_path: bool = False
    """Whether it is the path of a file."""

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it takes, if there is a list of them."""
        return tuple(self.listed())

    def read(self, text: str) -> Any:
        """The value of a text of a command line. Raises ValueError or ReshardError."""
        return self.check(self.parse(text))

    def check(self, value: Any) -> Any:
        """The value of an object of Python. Raises ValueError or ReshardError."""
        if not self.accepts(value):
            raise ValueError(self.expected)
        return self.convert(value)


SWITCH = Kind("bool", "True or False", lambda value: isinstance(value, bool))
FUNCTION = Kind("callable", "a function", callable)


def text(example: str) -> Kind:
    """Any text."""
    return Kind("str", f"text, for example {example!r}", lambda value: isinstance(value, str))


def dictionary(example: str) -> Kind:
    """A dictionary of Python."""
    return Kind("dict", f"a dictionary, for example {example}", lambda value: isinstance(value, Mapping))


def choice(choices: Sequence[str]) -> Kind:
    """One of some words."""
    return Kind(
        " or ".join(map(repr, choices)),
        f"one of {', '.join(choices)}",
        lambda value: isinstance(value, str) and value in choices,
        listed=lambda: choices,
    )


def name(known: Callable[[str], object], listed: Callable[[], Iterable[str]] = tuple) -> Kind:
    """The name of something. `known` returns what it means, or raises ReshardError."""
    return Kind("str", "a name", lambda value: isinstance(value, str), convert=known, listed=listed)


def count(least: int = 1, choices: Sequence[str] = (), expected: str = "") -> Kind:
    """An integer from `least` to `MAX_COUNT`, or one of some words. True and False are none."""

    def accepts(value: Any) -> bool:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        return least <= value <= MAX_COUNT if is_integer else isinstance(value, str) and value in choices

    number = expected or f"an integer of at least {least}, and below 2^31"
    return Kind(
        " or ".join([*map(repr, choices), "int"]),
        ", or ".join([number, *map(repr, choices)]),
        accepts,
        lambda text: text if text in choices else int(text),
    )


def number(least: float = -math.inf) -> Kind:
    """A finite number."""
    expected = f"a finite number of at least {least:g}" if least > -math.inf else "a finite number"
    return Kind("float", expected, lambda value: _is_finite(value) and value >= least, float)


def _is_finite(value: Any) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that is no float
        return False


def duration(least: float) -> Kind:
    """Seconds, which are typed with other units as well."""
    return Kind(
        "float",
        f"a duration of at least {words_of_seconds(least)}, such as 90s, 15m or 2h; in Python, seconds",
        number(least).accepts,
        seconds_of,
    )


def age() -> Kind:
    """Seconds, which are never typed without a unit."""
    return Kind("float", "an age with a unit, such as 12h or 7d", number(0).accepts, _seconds_with_unit)


def size(flag: str) -> Kind:
    """Bytes, as a number or with a unit. An error names the `flag`."""
    return Kind(
        "int or str", EXPECTED_SIZE, lambda value: True, convert=lambda value: parse_size(value, flag)
    )


def path(opened: Callable[[Any], Any] = lambda typed: typed) -> Kind:
    """A path or a URL, and what it opens."""

    def accepts(value: Any) -> bool:
        named = os.fspath(value) if isinstance(value, (str, PathLike)) else None
        return isinstance(named, str) and named != "" and "\0" not in named

    return Kind("str or path-like", "a path, a URL or Org/Model", accepts, convert=opened, is_path=True)


PATH, LOCAL_PATH = path(), path(Path)
"""A path as it was passed, and one on this machine."""


def several(element: Kind, expected: str = "", *, commas: bool = False, or_one: bool = False) -> Kind:
    """A list or tuple of values, or also one value alone. A command line has them with commas, or one by one.

    One string is no list: it would be a sequence of its letters.
    """

    def accepts(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return all(map(element.accepts, value))
        return or_one and element.accepts(value)

    return Kind(
        f"{element.title} or sequence of it" if or_one else f"sequence of {element.title}",
        expected or f"several, each of which is {element.expected}",
        accepts,
        lambda text: tuple(map(element.parse, text.split(","))),
        lambda value: tuple(map(element.convert, value if isinstance(value, (list, tuple)) else [value])),
        element=None if commas else element,
    )


# ------------------------------------------------------------------------------------- sizes and durations


EXPECTED_SIZE = "a number of bytes above 0, or one with a unit, such as 5GB or 512MiB"
_BYTES = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
SECONDS_OF_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_size(size: int | str, flag: str = "size") -> int:
    """Bytes of "5GB", "1GiB", "500M" or a plain number, at least one. Raises ReshardError naming `flag`."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]i?)?b?\s*", str(size).lower())
    if isinstance(size, int) and not isinstance(size, bool):
        nbytes = size
    else:
        nbytes = int(float(match[1]) * _BYTES[match[2] or ""]) if match else 0
    if nbytes < 1:
        raise ReshardError(
            "size-malformed",
            f"{flag} is not a size",
            expected=EXPECTED_SIZE,
            found=str(size),
            remedy=f"correct {flag}",
        )
    return nbytes


def seconds_of(text: str) -> float:
    """A duration with a unit, as 90s, 15m or 1.5h; plain numbers are seconds. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a duration, such as 90s, 15m or 2h")
    return float(match[1]) * SECONDS_OF_UNITS[match[2] or "s"]


def _seconds_with_unit(text: str) -> float:
    if not re.fullmatch(r"\d{1,9}[smhd]", text):
        raise ValueError(f"{text!r} is not an age with a unit")
    return seconds_of(text)


def words_of_seconds(seconds: float) -> str:
    """A duration with the largest unit of which it is a whole number: 90s, 15m, 2h."""
    unit = next((each for each in "dhm" if seconds and seconds % SECONDS_OF_UNITS[each] == 0), "s")
    return f"{seconds / SECONDS_OF_UNITS[unit]:g}{unit}"
