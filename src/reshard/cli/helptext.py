"""Help that fits the terminal. On a narrow one, each description is below its option."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable

import click

NARROW = 60
"""Columns below which two columns of text no longer fit next to each other."""

EXAMPLE = re.compile(r"(?m)^(?P<indent> *)(?P<command>\S.*\S) {2,}(?P<text>\S+(?: \S+)*)$")


class Formatter(click.HelpFormatter):
    """Click's help, also for fewer than 50 columns, click's minimum."""

    def __init__(
        self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None
    ) -> None:
        columns = shutil.get_terminal_size().columns
        if width is None:
            width = max(min(columns, max_width or 80) - 2, 20)
        super().__init__(indent_increment, width, max_width)

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write names and their texts, side by side or below each other."""
        if self.width >= NARROW:
            return super().write_dl([*rows], col_max, col_spacing)
        for name, text in rows:
            self.write_text(name)
            with self.indentation():
                self.write_text(text)
        return None

    def write_text(self, text: str) -> None:
        """Write paragraphs; on a narrow terminal, the text of an example goes below its command."""
        if self.width < NARROW:
            text = EXAMPLE.sub(self._below, text)
        super().write_text(text)

    def _below(self, example: re.Match[str]) -> str:
        indent = example["indent"] + "    "
        room = self.width - self.current_indent - len(indent)
        lines = textwrap.wrap(example["text"], max(room, 10), break_long_words=False, break_on_hyphens=False)
        return "\n".join([example["indent"] + example["command"], *(indent + line for line in lines)])


class Context(click.Context):
    """A context whose help is written by `Formatter`."""

    formatter_class = Formatter
