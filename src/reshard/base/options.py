"""Options declared once, as the fields of a record: names, types, defaults and help.

    @dataclass(frozen=True, kw_only=True)
    class Options:
        stall: Annotated[float, About("Longest time without progress.", "DURATION")] = 600.0

The command line (`cli/record.py`), the signature of a Python function (`takes`) and tables of the docs come from it.
A float is a duration in seconds, which on the command line has a unit: 90s, 15m, 2h.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from typing import Any, TypeVar, get_args, get_type_hints

R = TypeVar("R")

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class About:
    """The help of an option, and what stands for its value there."""

    help: str
    metavar: str | None = None


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


def options_of(record: type) -> Iterator[Option]:
    """The options that a record declares, in their order."""
    hints = get_type_hints(record, include_extras=True)
    for each in fields(record):
        kind, about = get_args(hints[each.name])
        yield Option(each.name, kind, None if each.default is MISSING else each.default, about)


def takes(record: type) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Let a function whose last argument is a record take its fields as keywords instead."""

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        @wraps(function)
        def wrapped(*given: Any, **options: Any) -> R:
            return function(*given, record(**options))

        signature = inspect.signature(function)
        own = list(signature.parameters.values())[:-1]
        more = [
            inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type
            )
            for each in options_of(record)
        ]
        lines = [f"    {each.name} : {each.about.help}" for each in options_of(record)]
        wrapped.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        wrapped.__doc__ = "\n".join([(function.__doc__ or "").rstrip(), "", "    Options:", "", *lines])
        return wrapped

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
