"""Tables: boxed on a terminal, as records on a narrow one, as plain columns in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from reshard.base.foreign_text import escape, printable_line

NARROW = 60
"""Columns of a terminal below which each row becomes a few lines."""

BESIDE = 36
"""Columns that the other cells need beside the first, which is a name and stays on one line."""


def print_table(console: Console, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows of untrusted text under their titles."""
    texts = [[printable_line(cell) for cell in row] for row in rows]
    if not console.is_terminal:
        _print_columns(console, titles, texts)
    elif console.width < max(NARROW, BESIDE + max((cell_len(row[0]) for row in texts), default=0)):
        _print_records(console, titles, texts)
    else:
        table = Table()
        for number, title in enumerate(titles):
            table.add_column(
                title, overflow="fold", no_wrap=number == 0
            )  # a truncated name identifies nothing
        for row in texts:
            table.add_row(*map(escape, row))
        console.print(table)


def _print_columns(console: Console, titles: Sequence[str], rows: list[list[str]]) -> None:
    """Print aligned columns for `awk`, `grep` and people: at least two spaces between them, one line per row."""
    lines = [[title.upper() for title in titles], *rows]
    widths = [max(map(cell_len, column)) for column in zip_longest(*lines, fillvalue="")]
    for line in lines:
        padded = [cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=False)]
        console.print(escape("  ".join(padded).rstrip()))


def _print_records(console: Console, titles: Sequence[str], rows: list[list[str]]) -> None:
    for first, *rest in rows:
        console.print(f"[bold]{escape(first)}[/]")
        for title, cell in zip(titles[1:], rest, strict=False):
            if cell:
                console.print(f"  {escape(title)}: {escape(cell)}")
