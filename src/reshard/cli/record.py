"""Command-line options made from a record that declares them (`base/options.py`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from reshard.base.options import (
    AGE,
    BYTES,
    COMMON,
    SECONDS,
    Names,
    Option,
    options_of,
    seconds_of,
    words_of_seconds,
)
from reshard.cli.options import LOCAL, TYPED, AtLeast


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A duration of at least so many seconds. That of an age is never without a unit."""

    name = "duration"

    def __init__(self, least: int, unit: str) -> None:
        self._least, self._is_age = least, unit == AGE

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if self._is_age and not re.fullmatch(r"\d{1,9}[smhd]", value):
            self.fail(f"{value!r} is not an age with a unit, such as 12h or 7d", param, ctx)
        try:
            seconds = seconds_of(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if seconds < self._least:
            self.fail(f"{value} is less than {self._least}s", param, ctx)
        return seconds


class Known(click.Choice):  # type: ignore[type-arg]  # click 8.1 takes no arguments
    """A name that `known` turns into one of the choices. It raises ReshardError for others."""

    def __init__(self, choices: Iterable[str], known: Callable[[str], Any]) -> None:
        super().__init__(list(choices))
        self._known = known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self._known(value)


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """Numbers with commas between them."""

    name = "numbers"

    def __init__(self, kind: Callable[[str], float], expected: str) -> None:
        self._kind, self._expected = kind, expected

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self._kind(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not {self._expected}", param, ctx)


class GroupedOption(click.Option):
    """An option that the help shows under a heading, `group`."""

    def __init__(self, *args: Any, group: str = COMMON, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


def _only_typed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command: it is given only those options of its record that were typed."""

    @wraps(function)
    def wrapper(**values: Any) -> Any:
        context = click.get_current_context()
        untyped = [
            each.name
            for each in context.command.params
            if isinstance(each, GroupedOption)
            and context.get_parameter_source(str(each.name)) is ParameterSource.DEFAULT
        ]
        return function(**{name: value for name, value in values.items() if name not in untyped})

    return wrapper


def record_options(
    record: type, names: Mapping[str, Names] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command with the options of a record. It is given those that were typed, by their names.

    `names` are those that the options take.
    """
    typed = [each for each in options_of(record) if each.is_typed]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        decorated = _only_typed(function)
        for each in reversed(typed):
            decorated = _option(each, names or {})(decorated)
        return decorated

    return decorate


def _option(option: Option, names: Mapping[str, Names]) -> Callable[[Any], Any]:
    about, flag = option.about, option.flag
    flags = [each for each in (flag, about.also) if each]
    if option.kind is bool:
        flags[0] += f"/{option.off}" if option.off else ""
        return click.option(
            *flags,
            option.name,
            cls=GroupedOption,
            group=about.group,
            is_flag=True,
            default=option.default,
            show_default=bool(option.off),
            help=about.help,
        )
    several = option.is_repeated
    return click.option(
        *flags,
        option.name,
        cls=GroupedOption,
        group=about.group,
        type=_type(option, names),
        multiple=several,
        default=_default(option),
        show_default=option.default is not None and option.default != (),
        metavar=about.metavar,
        help=about.help + " May be repeated." * several,
    )


def _default(option: Option) -> Any:
    """What the help shows as the default: a number with its unit."""
    if option.default is None:
        return None
    return words_of_seconds(option.default) if option.about.unit == SECONDS else option.default


def _type(option: Option, names: Mapping[str, Names]) -> click.ParamType[Any] | None:
    about = option.about
    if about.names:
        known = names[about.names]
        choices = list(known.some())
        return Known(choices, known.known) if choices and known.known else _choice(choices)
    if about.choices and option.kind is str:
        return click.Choice(about.choices)
    if about.unit in (SECONDS, AGE):
        return Duration(int(about.least), about.unit)
    if option.has_commas:
        return Numbers(option.element, about.expected)
    if about.unit == BYTES:
        return None
    return {
        float: click.FLOAT,
        int: AtLeast(int(max(about.least, 0)), about.choices, about.expected),
        Path: LOCAL,
        PathLike: TYPED,
    }.get(option.kind)


def _choice(choices: list[str]) -> click.Choice[str] | None:
    return click.Choice(choices) if choices else None
