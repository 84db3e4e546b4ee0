"""Options declared once, as the fields of a record: names, types, defaults and help.

    @dataclass(frozen=True, kw_only=True)
    class Options:
        stall: Annotated[float, About("Longest time without progress.", "DURATION", unit=SECONDS)] = 600.0

The command line (`cli/record.py`), the signature, documentation and checks of a Python function (`base/arguments.py`)
and tables of the docs come from it. Fields that are not annotated are no options. Records inherit options from each
other: several commands share those in `base/shared_options.py`. In a record, `HELP` replaces the help of inherited
options.

The type of a field chooses the kind of its values (`KINDS`). A Path is on this machine; what is a str or PathLike may
also be the name of something elsewhere. A Sequence or a tuple of texts is an option that may be repeated, a tuple of
numbers one with commas. A function is an argument of the Python function only.
"""

from __future__ import annotations

import os
import textwrap
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from reshard.base import values
from reshard.base.values import Kind

T = TypeVar("T")

SECONDS, AGE, BYTES = "seconds", "seconds ago", "bytes"
"""Units of numbers, which are typed with others: 90s, 15m, 2h; the same, but never without; and 5GB, 512MiB."""

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


KINDS: Mapping[Any, Callable[[About], Kind]] = {
    bool: lambda about: values.SWITCH,
    int: lambda about: values.count(int(about.least), about.choices, about.expected),
    float: lambda about: values.number(about.least),
    Path: lambda about: values.LOCAL_PATH,
    os.PathLike: lambda about: values.PATH,
    Mapping: lambda about: values.dictionary(about.metavar or "{}"),
    Callable: lambda about: values.FUNCTION,
    str: lambda about: values.choice(about.choices) if about.choices else values.text(about.metavar or ""),
}
"""The kind of the values of a type, or of a union of types, of which the first one here decides."""


def kind_of_values(hint: Any, about: About, flag: str) -> Kind:
    """The kind of the values of an option."""
    if about.unit:
        units = {
            SECONDS: values.duration(about.least),
            AGE: values.age(),
            BYTES: values.size(flag),
        }
        return units[about.unit]
    types = _members(hint)
    lists = [each for origin, each in types.items() if origin in (tuple, Sequence)]
    if lists:
        member, *_ = get_args(lists[0])
        return values.several(
            kind_of_values(member, replace(about, expected=""), flag),
            about.expected,
            commas=member in (int, float),
            or_one=len(types.keys() - {NoneType}) > 1,
        )
    return next(kind(about) for each, kind in KINDS.items() if each in types)


def _members(hint: Any) -> dict[Any, Any]:
    """The types of which a type is the union, by their classes."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return {get_origin(each) or each: each for each in members}


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

    @cached_property
    def kind(self) -> Kind:
        """The kind of its values."""
        return kind_of_values(self.type, self.about, self.flag)

    @property
    def is_optional(self) -> bool:
        """Whether None is a value: that nothing is given."""
        return self.kind is values.FUNCTION or NoneType in _members(self.type)

    @property
    def is_typed(self) -> bool:
        """Whether it is on the command line; functions are not."""
        return self.about.typed and self.kind is not values.FUNCTION

    @property
    def entry(self) -> str:
        """Its entry in the documentation of a function."""
        default = "optional" if self.default is None else f"default {self.default!r}"
        text = textwrap.fill(self.about.help, 116, initial_indent="    ", subsequent_indent="    ")
        return f"{self.name} : {self.kind.title}, {default}\n{text}"


@cache
def options_of(record: type) -> tuple[Option, ...]:
    """The options that a record declares, in their order. Evaluating annotations runs code: once is enough."""
    return tuple(_declared_options(record))


def _declared_options(record: type) -> Iterator[Option]:
    hints = get_type_hints(record, include_extras=True)
    help_texts = ChainMap(*(vars(each).get("HELP", {}) for each in record.__mro__))
    for each in fields(record):
        if get_origin(hints[each.name]) is Annotated:
            hint, about = get_args(hints[each.name])
            is_plain = each.default is not MISSING and not callable(each.default)
            default = each.default if is_plain else None
            about = replace(about, help=help_texts.get(each.name, about.help))
            yield Option(each.name, hint, default, about)


def part_of(record: type[T], options: object) -> T:
    """The fields of one record that a larger one has as well."""
    return record(**{each.name: getattr(options, each.name) for each in fields(cast(Any, record))})
