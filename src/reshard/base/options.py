"""Options declared once, as the fields of a record: names, types, defaults and help.

    @dataclass(frozen=True, kw_only=True)
    class Options:
        stall: Annotated[float, About("Longest time without progress.", "DURATION")] = 600.0

The command line (`cli/record.py`), the signature and documentation of a Python function (`takes`), the checks of its
arguments (`base/arguments.py`) and tables of the docs come from it.

A float is a duration in seconds, which on the command line has a unit: 90s, 15m, 2h. A Path is on this machine; what is
a str or PathLike may also be the name of something elsewhere. A Sequence is an option that may be repeated.
"""

from __future__ import annotations

import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from pathlib import Path
from typing import (
    Any,
    Concatenate,
    ParamSpec,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_KINDS = (bool, float, int, Sequence, Path, os.PathLike, Mapping, Callable, str)
"""Types of options. The first of these that a type contains decides how a value is read."""


@dataclass(frozen=True)
class About:
    """The help of an option, what stands for its value there, and what its type does not say."""

    help: str
    metavar: str | None = None
    least: int = 0
    """The smallest number, in seconds for a duration."""
    choices: tuple[str, ...] = ()
    """The words that it takes; of a number, those that it takes as well."""
    also: str | None = None
    """Another flag."""
    off: str | None = None
    """The flag that switches it off; by default --no-NAME if it is on."""


@dataclass(frozen=True)
class Option:
    """An option: the name and type of its field, its default, and what is said about it."""

    name: str
    type: Any
    default: Any
    about: About

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def off(self) -> str | None:
        """The flag that switches it off."""
        return self.about.off or (f"--no-{self.flag[2:]}" if self.default is True else None)

    @property
    def kind(self) -> Any:
        """The one of `_KINDS` that decides how its value is read."""
        found = [get_origin(each) or each for each in (self.type, *get_args(self.type))]
        return next(each for each in _KINDS if each in found)

    def documented(self) -> str:
        """Its entry in the documentation of a function."""
        kind = " or ".join([*map(repr, self.about.choices), *["int"] * (self.kind is int)])
        default = "optional" if self.default is None else f"default {self.default!r}"
        text = re.sub(r"--([a-z-]+)", lambda flag: f"`{flag[1].replace('-', '_')}`", self.about.help)
        indented = textwrap.fill(text, 116, initial_indent="    ", subsequent_indent="    ")
        return f"{self.name} : {kind or self.kind.__name__}, {default}\n{indented}"


def options_of(record: type) -> Iterator[Option]:
    """The options that a record declares, in their order."""
    hints = get_type_hints(record, include_extras=True)
    for each in fields(record):
        kind, about = get_args(hints[each.name])
        yield Option(each.name, kind, None if each.default is MISSING else each.default, about)


def words_for(record: type, values: Mapping[str, Any]) -> list[str]:
    """The words of a command line that gives options these values, without those that are the defaults."""
    words: list[str] = []
    for each in options_of(record):
        value = values.get(each.name)
        if value is None or value == each.default:
            continue
        if each.kind is bool:
            words.append(str(each.flag if value else each.off))
        else:
            several = value if each.kind is Sequence else [value]
            words += [word for one in several for word in (each.flag, str(one))]
    return words


def takes(
    record: Callable[P, object],
) -> Callable[[Callable[Concatenate[A, ...], R]], Callable[Concatenate[A, P], R]]:
    """Give a function of one argument and of any keywords the signature and documentation of a record's fields."""

    def decorate(function: Callable[Concatenate[A, ...], R]) -> Callable[Concatenate[A, P], R]:
        options = list(options_of(cast(type, record)))
        own = list(inspect.signature(function).parameters.values())[:-1]
        more = [
            inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type
            )
            for each in options
        ]
        signature = inspect.signature(function).replace(parameters=[*own, *more])

        @wraps(function)
        def wrapper(*given: Any, **named: Any) -> R:
            signature.bind(*given, **named)  # Python's TypeError for unknown names
            return function(*given, **named)

        text, returns, rest = inspect.cleandoc(function.__doc__ or "").partition("\n\nReturns\n")
        wrapper.__doc__ = "\n".join([text, *(each.documented() for each in options)]) + returns + rest
        wrapper.__signature__ = signature  # type: ignore[attr-defined]
        return cast("Callable[Concatenate[A, P], R]", wrapper)

    return decorate


def seconds_of(text: str) -> float:
    """A duration with a unit, as 90s, 15m or 1.5h; plain numbers are seconds. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a duration, such as 90s, 15m or 2h")
    return float(match[1]) * _UNITS[match[2] or "s"]


def words_of_seconds(seconds: float) -> str:
    """A duration with the largest unit of which it is a whole number: 90s, 15m, 2h."""
    unit = next((each for each in ("d", "h", "m") if seconds and seconds % _UNITS[each] == 0), "s")
    return f"{seconds / _UNITS[unit]:g}{unit}"
