"""Command-line options made from a record that declares them (`base/options.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from reshard.base.options import Option, options_of, seconds_of, words_of_seconds
from reshard.cli.options import LOCAL, AtLeast


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


def record_options(record: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command with the options of a record. It is given those that were typed, by their names."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapper(*given: Any, **values: Any) -> Any:
            source = click.get_current_context().get_parameter_source
            for each in options_of(record):
                if source(each.name) is ParameterSource.DEFAULT:
                    del values[each.name]
            return function(*given, **values)

        decorated: Callable[..., Any] = wrapper
        for each in reversed(list(options_of(record))):
            decorated = _option(each)(decorated)
        return decorated

    return decorate


def _option(option: Option) -> Callable[[Any], Any]:
    about, flag = option.about, option.flag
    flags = [each for each in (flag, about.also) if each]
    if option.kind is bool:
        flags = [f"{flag}/{option.off}" if option.off else flag]
        return click.option(
            *flags,
            option.name,
            is_flag=True,
            default=option.default,
            show_default=bool(option.off),
            help=about.help,
        )
    several = option.kind is Sequence
    return click.option(
        *flags,
        option.name,
        type=_type(option),
        multiple=several,
        default=words_of_seconds(option.default) if option.kind is float else option.default,
        show_default=option.default is not None,
        metavar=about.metavar,
        help=about.help + " May be repeated." * several,
    )


def _type(option: Option) -> click.ParamType[Any] | None:
    about = option.about
    if about.choices and option.kind is str:
        return click.Choice(about.choices)
    return {float: Duration(about.least), int: AtLeast(about.least, about.choices), Path: LOCAL}.get(
        option.kind
    )
