"""Arguments of the public functions, checked as click checks the command line."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError
from reshard.base.options import BYTES, Names, Option, options_of
from reshard.base.suggest import meant

StrPath = str | PathLike[str]
OnBytes = Callable[[int], None]
"""Callback that receives the number of bytes just completed."""

_UNITS = {
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


MAX_COUNT = 2**31 - 1
"""The largest number of ranks, threads, rows and the like: frameworks keep most of them in 32 bits."""


_TRUE, _FALSE = ("true", "yes", "on", "1", "t", "y"), ("false", "no", "off", "0", "f", "n")
"""Words for true and false, as transformers, accelerate and YAML 1.1 know them."""


def truth(value: object) -> bool | None:
    """Whether a word or value of an option, a config or a variable is true; None if it is neither true nor false."""
    word = str(value).lower()
    return word in _TRUE if word in (*_TRUE, *_FALSE) else None


def is_whole(value: object, least: int = 1) -> bool:
    """Whether a value is an integer from `least` to `MAX_COUNT`. True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_COUNT


def whole_number(least: int = 1) -> str:
    """What `is_whole` accepts, in words."""
    return f"an integer of at least {least}, and below 2^31"


def parse_size(size: int | str, flag: str = "size") -> int:
    """Bytes of "5GB", "1GiB", "500M" or a plain number, at least one. Raises ReshardError naming `flag`."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]i?)?b?\s*", str(size).lower())
    if isinstance(size, int) and not isinstance(size, bool):
        nbytes = size
    else:
        nbytes = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if nbytes < 1:
        raise ReshardError(
            "size-malformed",
            f"{flag} is not a size",
            expected="a number of bytes above 0, or one with a unit, such as 5GB or 512MiB",
            found=str(size),
            remedy=f"correct {flag}",
        )
    return nbytes


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that is no float
        return False


_ELEMENTS: Mapping[type, Callable[[Any], bool]] = {
    int: lambda each: is_whole(each, 0),
    str: lambda each: isinstance(each, str),
}
"""Whether something is one of several values of a type. Functions check those of other types."""


class Arguments:
    """The arguments of one call. Each check records a problem; `settle` raises all of them together."""

    def __init__(self, function: str, names: Mapping[str, Names] | None = None) -> None:
        """`names` are those that options of its record take."""
        self._function, self._names = function, names or {}
        self.problems: list[Problem] = []

    def choice(self, name: str, value: Any, choices: Collection[str]) -> None:
        """Check for one of the `choices`, or None."""
        if value is None or (isinstance(value, str) and value in choices):
            return
        near = meant(value, choices) if isinstance(value, str) else None
        self.wrong(name, value, f"one of {', '.join(choices)}", f"{name}={near!r}" if near else None)

    def known(self, name: str, value: Any, known: Callable[[str], object]) -> None:
        """Check for a name that `known` accepts, or None. `known` raises ReshardError for others."""
        if value is None:
            return
        if not isinstance(value, str):
            self.wrong(name, value, "a name")
            return
        try:
            known(value)
        except ReshardError as error:
            self.problems += error.problems

    def count(self, option: Option, value: Any) -> None:
        """Check for an integer that is not too small, or one of the words that are allowed as well."""
        about = option.about
        if not (is_whole(value, int(about.least)) or (isinstance(value, str) and value in about.choices)):
            expected = about.expected or whole_number(int(about.least))
            self.wrong(option.name, value, ", or ".join([expected, *map(repr, about.choices)]))

    def counted(self, name: str, value: Any) -> None:
        """Check for an integer of at least 1, or None."""
        if value is not None and not is_whole(value):
            self.wrong(name, value, whole_number())

    def number(self, name: str, value: Any, least: float = -math.inf) -> None:
        """Check for a finite number that is not below `least`, or None."""
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and _is_finite(value) and value >= least):
            self.wrong(
                name,
                value,
                f"a finite number of at least {least}" if least > -math.inf else "a finite number",
            )

    def several(self, name: str, values: Any, kind: type = str, expected: str = "several strings") -> None:
        """Check for several values of a type. One string would be a sequence of its letters."""
        fits = _ELEMENTS.get(kind, lambda each: True)
        if not isinstance(values, (tuple, list)) or not all(map(fits, values)):
            self.wrong(name, values, expected)

    def text(self, name: str, value: Any, example: str) -> None:
        """Check for text such as `example`, or None."""
        if not (value is None or isinstance(value, str)):
            self.wrong(name, value, f"text, for example {example!r}")

    def mapping(self, name: str, value: Any, example: str) -> None:
        """Check for a dictionary such as `example`, or None."""
        if not (value is None or isinstance(value, Mapping)):
            self.wrong(name, value, f"a dictionary, for example {example}")

    def path(self, name: str, value: Any) -> None:
        """Check for a path or a URL."""
        text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
        if not isinstance(text, str) or not text or "\0" in text:
            self.wrong(name, value, "a path, a URL or Org/Model")

    def switches(self, **values: Any) -> None:
        """Check for True or False: any text would be true."""
        for name, value in values.items():
            if not isinstance(value, bool):
                self.wrong(name, value, "True or False")

    def callbacks(self, **values: Any) -> None:
        """Check for functions, or None."""
        for name, value in values.items():
            if not (value is None or callable(value)):
                self.wrong(name, value, "a function")

    def size(self, flag: str, value: Any) -> int:
        """A size in bytes, or 0 if it is malformed."""
        try:
            return parse_size(value, flag)
        except ReshardError as error:
            self.problems += error.problems
            return 0

    def options(self, record: type, given: Mapping[str, Any]) -> dict[str, Any]:
        """Check options of a record, and settle. Returns those that are not None, with paths as Path."""
        told = [(each, given[each.name]) for each in options_of(record) if each.name in given]
        told = [(each, value) for each, value in told if value is not None or not each.is_optional]
        for each, value in told:
            self._option(each, value)
        self.settle()
        return {each.name: _read(each, value) for each, value in told}

    def _option(self, option: Option, value: Any) -> None:
        name, kind, about = option.name, option.kind, option.about
        if about.names:
            self._named(name, value, self._names[about.names])
        elif about.unit == BYTES:
            self.size(option.flag, value)
        elif about.choices and kind is str:
            self.choice(name, value, about.choices)
        elif kind is bool:
            self.switches(**{name: value})
        elif kind is float:
            self.number(name, value, about.least)
        elif kind is int:
            self.count(option, value)
        elif kind is tuple or option.has_commas:
            self.several(
                name, value, option.element, about.expected or f"several of {option.element.__name__}"
            )
        elif kind in (Path, PathLike):
            self.path(name, value)
        elif kind is Mapping:
            self.mapping(name, value, about.metavar or "")
        elif kind is Callable:
            self.callbacks(**{name: value})
        elif kind is str:
            self.text(name, value, about.metavar or "")

    def _named(self, name: str, value: Any, names: Names) -> None:
        if names.known is None:
            self.choice(name, value, list(names.some()))
        else:
            self.known(name, value, names.known)

    def wrong(self, name: str, value: Any, expected: str, remedy: str | None = None) -> None:
        """Record that a value is not what is `expected`."""
        self.problems.append(
            Problem(
                "argument-wrong",
                f"{self._function}: wrong value for {name}",
                expected=expected,
                found=f"{name}={value!r}",
                remedy=f"did you mean {remedy}?" if remedy else None,
            )
        )

    def settle(self) -> None:
        """Raise ReshardError with all recorded problems, if there are any."""
        if self.problems:
            raise ReshardError(self.problems)


def _read(option: Option, value: Any) -> Any:
    """The value of an option, which has been checked."""
    if option.about.unit == BYTES:
        return parse_size(value)
    if option.kind is tuple:
        return tuple(value)
    return Path(value) if option.kind is Path else value
