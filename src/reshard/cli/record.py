"""Command-line options made from a record that declares them (`base/options.py`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from reshard.base.options import Option, options_of, seconds_of, words_of_seconds
from reshard.cli.options import COUNT, LOCAL


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A duration with a unit."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return seconds_of(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def record_options(record: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command with the options of a record; it is given the values by their names."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for each in reversed(list(options_of(record))):
            function = _option(each)(function)
        return function

    return decorate


def _option(option: Option) -> Callable[[Any], Any]:
    about, flag = option.about, option.flag
    default = words_of_seconds(option.default) if option.type is float else option.default
    given: dict[str, Any] = {"default": default, "help": about.help, "metavar": about.metavar}
    if option.type is bool:
        names = f"{flag}/--no-{flag[2:]}" if option.default else flag
        return click.option(names, option.name, is_flag=True, default=option.default, help=about.help)
    if get_origin(option.type) is Literal:
        return click.option(flag, type=click.Choice(get_args(option.type)), show_default=True, **given)
    return click.option(flag, type=_type(option), show_default=bool(default), **given)


def _type(option: Option) -> click.ParamType[Any] | None:
    kinds = {float: Duration(), int: COUNT, Path: LOCAL, str: None}
    return next(kinds[each] for each in (option.type, *get_args(option.type)) if each in kinds)
