"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from reshard.base.argument_checks import MAX_COUNT
from reshard.base.errors import ReshardError
from reshard.base.exceptions_to_problems import problems_of
from reshard.stores import at_home, source_path, typed_path


class PathType(click.ParamType):  # type: ignore[type-arg]  # click 8.1 takes no arguments
    """A path or URL, which shells complete as a path. `read` converts the text."""

    name = "path"

    def __init__(self, read: Callable[[str], str | Path]) -> None:
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | Path:
        if value == "":  # Path("") would be the current folder
            self.fail("an empty path: is a variable of the shell not set?", param, ctx)
        if "\0" in str(value):
            self.fail("a path with a null character", param, ctx)
        try:
            return value if isinstance(value, Path) else self._read(value)
        except OSError as error:  # a name that is too long, a folder that may not be searched
            raise ReshardError(problems_of(error)) from error

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        return [CompletionItem(incomplete, type="file")]


SOURCE, OUTPUT = PathType(source_path), PathType(typed_path)
LOCAL, TYPED = PathType(at_home), PathType(str)
"""Paths to read (local, in a store, or on the Hub), paths to write, paths of this machine, and paths as typed."""


class AtLeast(click.ParamType):  # type: ignore[type-arg]
    """A whole number that is not below `least`, or a word. click's IntRange shows its range as `x>=1`."""

    name = "integer"

    def __init__(self, least: int, words: tuple[str, ...] = (), expected: str = "") -> None:
        self._least, self._words = least, words
        number = expected or "a whole number"
        self._unlike = f"neither {number} nor {' or '.join(words)}" if words else f"not {number}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value in self._words:
            return str(value)
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is {self._unlike}", param, ctx)
        if number < self._least:
            self.fail(f"{number} is less than {self._least}", param, ctx)
        if number > MAX_COUNT:
            self.fail(f"{number} is more than {MAX_COUNT}", param, ctx)
        return number


def quiet_option(help: str = "Print warnings and errors only.") -> Callable[[Any], Any]:
    """`--quiet`, or `-q`."""
    return click.option("-q", "--quiet", is_flag=True, help=help)
