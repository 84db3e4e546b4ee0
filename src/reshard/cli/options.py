"""The type of all options and arguments, and those that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from reshard.base import values
from reshard.base.errors import ReshardError
from reshard.base.exceptions_to_problems import problems_of
from reshard.base.later_imports import imported_later
from reshard.base.values import Kind

with imported_later(__name__):
    from reshard.stores import expanded_path, source_path, typed_path


class WrongValue(click.BadParameter):
    """A text that is no value of a kind."""

    def __init__(
        self, text: str, kind: Kind, param: click.Parameter | None, ctx: click.Context | None
    ) -> None:
        super().__init__(f"{text!r} is not {kind.expected}", ctx, param)
        self.text, self.kind = text, kind
        self.remedy = None if text else "is a variable of the shell not set?"


class ValueType(click.ParamType):  # type: ignore[type-arg]  # click 8.1 takes no arguments
    """Values of a kind. Shells complete words and paths."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.name = kind, kind.title

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):  # a default
            return value
        try:
            return self.kind.read(value)
        except ValueError:
            raise WrongValue(value, self.kind, param, ctx) from None
        except OSError as error:  # a name that is too long, a folder that may not be searched
            raise ReshardError(problems_of(error)) from error

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        if self.kind.is_path:
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(word) for word in self.kind.choices if word.startswith(incomplete)]


SOURCE, OUTPUT, LOCAL = (ValueType(values.path(each)) for each in (source_path, typed_path, expanded_path))
"""Paths to read (local, in a store, or on the Hub), paths to write, and paths of this machine."""

TARGET = ValueType(values.PATH)
"""A path as it was typed."""


def quiet_option(help: str = "Print warnings and errors only.") -> Callable[[Any], Any]:
    """`--quiet`, or `-q`."""
    return click.option("-q", "--quiet", is_flag=True, help=help)
