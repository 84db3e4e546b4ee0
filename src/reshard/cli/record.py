"""Command-line options made from a record that declares them (`base/options.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from reshard.base.options import (
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
    """A duration with a unit, of at least so many seconds."""

    name = "duration"

    def __init__(self, least: int) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
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
    """Whole numbers with commas between them."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(
                f"{value!r} is not whole numbers with commas between them, such as 10,12,12,10", param, ctx
            )


class GroupedOption(click.Option):
    """An option that the help shows under a heading, `group`."""

    def __init__(self, *args: Any, group: str = COMMON, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


def only_typed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command: it is given only those options that were typed."""

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
        decorated = only_typed(function)
        for each in reversed(typed):
            decorated = _option(each, names or {})(decorated)
        return decorated

    return decorate


def _option(option: Option, names: Mapping[str, Names]) -> Callable[[Any], Any]:
    about, flag = option.about, option.flag
    flags = [each for each in (flag, about.also) if each]
    if option.kind is bool:
        flags = [f"{flag}/{option.off}" if option.off else flag]
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
    several = option.kind is Sequence or (option.kind is tuple and option.element is str)
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
    if about.unit == SECONDS:
        return Duration(int(about.least))
    if option.kind is tuple:
        return Numbers() if option.element is int else None
    if about.unit == BYTES:
        return None
    return {
        float: click.FLOAT,
        int: AtLeast(int(max(about.least, 0)), about.choices),
        Path: LOCAL,
        PathLike: TYPED,
    }.get(option.kind)


def _choice(choices: list[str]) -> click.Choice[str] | None:
    return click.Choice(choices) if choices else None
