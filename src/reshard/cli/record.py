"""Command-line options made from a record that declares them (`base/options.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import click
from click.core import ParameterSource

from reshard.base import values
from reshard.base.errors import ReshardError
from reshard.base.foreign_text import printable_line
from reshard.base.options import COMMON, SECONDS, Option, options_of
from reshard.base.values import Kind, words_of_seconds
from reshard.cli.options import LOCAL, ValueType


class GroupedOption(click.Option):
    """An option that the help shows under a heading, `group`. Different values are an error where it takes one."""

    def __init__(self, *args: Any, group: str = COMMON, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        super().add_to_parser(_Appending(parser), ctx)  # type: ignore[arg-type]

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        values = opts.get(str(self.name))
        if values and not self.multiple:
            typed = dict.fromkeys(map(self._typed, values))
            if len(typed) > 1 and not ctx.resilient_parsing:
                raise ReshardError(
                    "option-given-twice",
                    f"{self.opts[-1]} is set twice, to different values",
                    found=", ".join(typed),
                    remedy="leave out one of them",
                )
            opts = {**opts, str(self.name): values[-1]}
        return super().consume_value(ctx, opts)

    def _typed(self, value: Any) -> str:
        """The option and a value as they are typed."""
        if self.is_flag:
            return (self.secondary_opts if value is False else self.opts)[-1]
        return printable_line(f"{self.opts[-1]} {value}")


class _Appending:
    """A parser that keeps each value of an option, where click keeps the last one."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser

    def add_option(self, *, action: str, **how: Any) -> None:
        """Add an option to the parser."""
        self._parser.add_option(action=action.replace("store", "append"), **how)


def record_options(
    record: type, kinds: Mapping[str, Kind] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command that takes a record, as `options`, with the record's options.

    `kinds` are those of options about which the record knows too little.
    """
    declared = {each.name: each for each in options_of(record) if each.is_typed}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(**values: Any) -> Any:
            source = click.get_current_context().get_parameter_source
            typed = [name for name in declared if source(name) is not ParameterSource.DEFAULT]
            others = {name: value for name, value in values.items() if name not in declared}
            return function(**others, options=record(**{name: values[name] for name in typed}))

        for name, each in reversed(declared.items()):
            command = _option(each, (kinds or {}).get(name, each.kind))(command)
        return command

    return decorate


def _option(option: Option, kind: Kind) -> Callable[[Any], Any]:
    about = option.about
    flags = [each for each in (option.flag, about.also) if each]
    if kind is values.SWITCH:
        flags[0] += f"/{option.off}" if option.off else ""
        value: dict[str, Any] = {
            "is_flag": True,
            "default": option.default,
            "show_default": bool(option.off),
            "help": about.help,
        }
    else:
        value = {
            "type": _type(kind.element or kind),
            "multiple": kind.element is not None,
            "default": _default(option),
            "show_default": option.default not in (None, ()),
            "metavar": about.metavar or (f"[{'|'.join(kind.choices)}]" if kind.choices else None),
            "help": about.help + " May be repeated." * (kind.element is not None),
        }
    return click.option(*flags, option.name, cls=GroupedOption, group=about.group, **value)


def _type(kind: Kind) -> ValueType:
    """The type of a kind. A local path may begin with a ~, which shells do not expand after the = of an option."""
    return LOCAL if kind is values.LOCAL_PATH else ValueType(kind)


def _default(option: Option) -> Any:
    """What the help shows as the default: a duration with its unit."""
    is_duration = option.about.unit == SECONDS and option.default is not None
    return words_of_seconds(option.default) if is_duration else option.default
