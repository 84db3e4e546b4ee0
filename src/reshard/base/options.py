"""Options declared once, as the fields of a record: names, types, defaults and help.

    @dataclass(frozen=True, kw_only=True)
    class Options:
        stall: Annotated[float, About("Longest time without progress.", "DURATION", unit=SECONDS)] = 600.0

The command line (`cli/record.py`), the signature and documentation of a Python function (`with_options`), the checks of
its arguments (`base/argument_checks.py`) and tables of the docs come from it. Fields that are not annotated are no
options. Records inherit options from each other: several commands share those in `base/shared_options.py`. In a record,
`HELP` replaces the help of inherited options.

A Path is on this machine; what is a str or PathLike may also be the name of something elsewhere. A Sequence or a tuple
of texts is an option that may be repeated, a tuple of numbers one with commas. A function is an argument of the Python
function only.
"""

from __future__ import annotations

import inspect
import os
import re
import textwrap
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache, wraps
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    Concatenate,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from reshard.base.errors import ArgumentsError, Problem
from reshard.base.suggest import did_you_mean

A = TypeVar("A")
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_KINDS = (bool, float, tuple, int, Sequence, Path, os.PathLike, Mapping, Callable, str)
"""Types of options. The first of these that a type contains decides how a value is read."""


SECONDS, AGE, BYTES = "seconds", "seconds ago", "bytes"
"""Units of numbers, which are typed with others: 90s, 15m, 2h; the same, but never without; and 5GB, 512MiB."""

LocalPath = str | Path | os.PathLike[str]
"""A path on this machine."""

COMMON, DATA, LAYOUT, PARALLEL, ADAPTERS, MACHINES, ADVANCED = GROUPS = (
    "Options",
    "Data",
    "Layout of the output",
    "Parallelism and machines",
    "LoRA adapters",
    "Stores and machines",
    "Advanced",
)
"""Headings in the help of a command, in their order."""


@dataclass(frozen=True)
class About:
    """The help of an option, what stands for its value there, and what its type does not say."""

    help: str
    metavar: str | None = None
    least: float = 0
    """The smallest number, in its unit."""
    unit: str = ""
    """`SECONDS`, `AGE`, `BYTES`, or none."""
    choices: tuple[str, ...] = ()
    """The words that it takes; of a number, those that it takes as well."""
    names: str | None = None
    """Of what it takes the name: a key of the `Names` that the command knows."""
    group: str = COMMON
    """The heading under which the help of a command shows it."""
    flag: str | None = None
    """The flag, if it is not the name of the field."""
    expected: str = ""
    """What a value is, in the message about one that is not."""
    only_reads: bool = False
    """Whether it only says how a source is read, and asks for no other output."""
    typed: bool = True
    """Whether it is on the command line too."""
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
        return self.about.flag or "--" + self.name.replace("_", "-")

    @property
    def off(self) -> str | None:
        """The flag that switches it off."""
        return self.about.off or (f"--no-{self.flag[2:]}" if self.default is True else None)

    @property
    def kind(self) -> Any:
        """The one of `_KINDS` that decides how its value is read."""
        return next(each for each in _KINDS if each in self._types)

    @property
    def _types(self) -> list[Any]:
        """Its type, or those of which it is a union."""
        types = get_args(self.type) if get_origin(self.type) in (Union, UnionType) else [self.type]
        return [get_origin(each) or each for each in types]

    @property
    def is_optional(self) -> bool:
        """Whether None is a value: that nothing is given."""
        return self.kind is Callable or type(None) in self._types

    @property
    def element(self) -> Any:
        """The type of each of several values."""
        lists = [each for each in (self.type, *get_args(self.type)) if get_origin(each) in (tuple, Sequence)]
        return next((each for each in get_args((lists or [self.type])[0]) if isinstance(each, type)), str)

    @property
    def has_commas(self) -> bool:
        """Whether several values are one text with commas on the command line: numbers."""
        return self.kind in (tuple, Sequence) and self.element is not str

    @property
    def is_repeated(self) -> bool:
        """Whether each of several values has a flag of its own there: texts."""
        return self.kind in (tuple, Sequence) and self.element is str

    @property
    def is_typed(self) -> bool:
        """Whether it is on the command line; functions are not."""
        return self.about.typed and self.kind is not Callable

    def documented(self, words: Mapping[str, str]) -> str:
        """Its entry in the documentation of a function; `words` are words of its help, and arguments instead."""
        sizes = ["int", "str"] if self.about.unit == BYTES else ["int"] * (self.kind is int)
        kind = " or ".join([*map(repr, self.about.choices), *sizes])
        default = "optional" if self.default is None else f"default {self.default!r}"
        text = re.sub(r"--([a-z-]+)", lambda flag: f"`{flag[1].replace('-', '_')}`", self.about.help)
        text = re.sub(r"\b[A-Z]+\b", lambda word: words.get(word[0], word[0]), text)
        text = re.sub(r" \[default: (.*)\]", r" By default \1.", text)
        indented = textwrap.fill(text, 116, initial_indent="    ", subsequent_indent="    ")
        return f"{self.name} : {kind or self._named}, {default}\n{indented}"

    @property
    def _named(self) -> str:
        """The name of its type in documentation."""
        plain = {Callable: "callable", Mapping: "dict", Path: "path-like", os.PathLike: "path-like"}
        several = f"{self.kind.__name__.lower()} of {self.element.__name__}"
        named = several if self.kind in (tuple, Sequence) else plain.get(self.kind, self.kind.__name__)
        other = "str or " if self.kind is Path or (self.kind is not str and str in self._types) else ""
        return f"{other}{named}"


@cache
def options_of(record: type) -> tuple[Option, ...]:
    """The options that a record declares, in their order. Evaluating annotations runs code: once is enough."""
    return tuple(_declared(record))


def _declared(record: type) -> Iterator[Option]:
    hints = get_type_hints(record, include_extras=True)
    told = ChainMap(*(vars(each).get("HELP", {}) for each in record.__mro__))
    for each in fields(record):
        if get_origin(hints[each.name]) is Annotated:
            kind, about = get_args(hints[each.name])
            is_plain = each.default is not MISSING and not callable(each.default)
            default = each.default if is_plain else None
            yield Option(each.name, kind, default, replace(about, help=told.get(each.name, about.help)))


def part_of(record: type[T], options: object) -> T:
    """The fields of one record that a larger one has as well."""
    return record(**{each.name: getattr(options, each.name) for each in fields(cast(Any, record))})


@dataclass(frozen=True)
class Names:
    """Names that an option takes: some of them, and the function that knows one. It raises ReshardError for others."""

    some: Callable[[], Iterable[str]] = tuple
    known: Callable[[str], object] | None = None


def takes(
    record: Callable[P, object],
) -> Callable[[Callable[Concatenate[A, ...], R]], Callable[Concatenate[A, P], R]]:
    """`with_options` of one record, for a function of one argument: what type checkers know of it."""
    return with_options(cast(type, record))


def takes_also(record: type) -> Callable[[F], F]:
    """`with_options` of a record, for any function. Type checkers know its own arguments and no others."""
    return with_options(record)


def with_options(record: Any, positional: int = 0) -> Callable[[Callable[..., Any]], Any]:
    """Give a function of any keywords the signature and documentation of a record's fields.

    The first `positional` fields are arguments that need no names, after those that the function has itself. The help
    of options calls these by their names in capitals, and PATH or else the first one also SRC.
    """
    options, kinds = options_of(record), inspect.Parameter

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = list(inspect.signature(function).parameters.values())[:-1]
        more = [
            inspect.Parameter(
                each.name,
                kinds.POSITIONAL_OR_KEYWORD if number < positional else kinds.KEYWORD_ONLY,
                default=each.default,
                annotation=each.type,
            )
            for number, each in enumerate(options)
        ]
        signature = inspect.signature(function).replace(parameters=[*own, *more])
        words = {each.name.upper(): f"`{each.name}`" for each in own}
        words = {"SRC": words.get("PATH", f"`{own[0].name}`"), **words}

        @wraps(function)
        def wrapper(*given: Any, **named: Any) -> Any:
            _check_call(function.__name__, signature, given, named)
            unnamed = zip((each.name for each in options[:positional]), given[len(own) :], strict=False)
            return function(*(given[: len(own)] if positional else given), **named, **dict(unnamed))

        text, returns, rest = inspect.cleandoc(function.__doc__ or "").partition("\n\nReturns\n")
        wrapper.__doc__ = "\n".join([text, *(each.documented(words) for each in options)]) + returns + rest
        wrapper.__signature__ = signature  # type: ignore[attr-defined]
        return wrapper

    return decorate


_ALL_ARGUMENTS = "see help() of this function for all its arguments"


def _check_call(
    name: str, signature: inspect.Signature, given: Sequence[Any], named: Mapping[str, Any]
) -> None:
    """Raise ArgumentsError unless a function with this signature can be called so."""
    known = list(signature.parameters)
    problems = [
        Problem(
            "argument-unknown",
            f"{name}() got an unexpected keyword argument {each!r}",
            remedy=did_you_mean(each, known, _ALL_ARGUMENTS),
        )
        for each in named
        if each not in known
    ]
    if problems:
        raise ArgumentsError(problems)
    try:
        signature.bind(*given, **named)
    except TypeError as error:
        raise ArgumentsError(
            "arguments-do-not-fit", f"{name}() got wrong arguments: {error}", remedy=_ALL_ARGUMENTS
        ) from None


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
