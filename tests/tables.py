"""Tables in pages that are made from declarations. `python -m tests.tables` rewrites them."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import click

from reshard.base.options import options_of
from reshard.cli import cli
from reshard.cli.support import NOT_TESTED, support
from reshard.runs.follow.options import WatchOptions
from reshard.runs.guard.options import GuardOptions
from reshard.runs.mcp.options import ServerOptions as McpOptions
from reshard.runs.train.options import TrainOptions
from reshard.serve.options import ServeOptions

DOCS = Path(__file__).parents[1] / "docs"


def families() -> list[list[str]]:
    """The cells of the table of families."""
    return [
        [
            f"`{row['name']}`",
            row["architecture"],
            row["engine"],
            ", ".join(row["judged"]) or NOT_TESTED,
            ", ".join(f"`{alias}`" for alias in row["aliases"]),
        ]
        for row in support()["families"]
    ]


def undeclared() -> list[list[str]]:
    """The cells of the table of undeclared models."""
    return [[f"`{row['name']}`", row["why"]] for row in support()["undeclared"]]


def options(record: type, *command: str) -> list[list[str]]:
    """The cells of the table of the options that a command takes of a record."""
    found: click.Command | None = cli
    for word in command:
        assert isinstance(found, click.Group)
        found = found.get_command(click.Context(found), word)
    assert found is not None
    flags = {each.name: each for each in found.params if isinstance(each, click.Option)}
    return [
        [
            " ".join([f"`{opt}`" for opt in flags[each.name].opts]) + _value(flags[each.name]),
            _default(flags[each.name]),
            each.about.help,
        ]
        for each in options_of(record)
    ]


def _value(flag: click.Option) -> str:
    values = (flag.metavar or "").strip("[]").split("|")
    return "".join(f" `{value}`" for value in values if value)


def _default(flag: click.Option) -> str:
    if flag.is_flag:
        return " ".join(["on;"] * bool(flag.default) + [f"`{each}`" for each in flag.secondary_opts])
    return f"`{flag.default}`" if flag.default is not None else ""


TABLES = {
    "Family": (DOCS / "families.md", families),
    "Model": (DOCS / "families.md", undeclared),
    "Option of guard": (DOCS / "guard.md", partial(options, GuardOptions, "guard")),
    "Option of mcp": (DOCS / "mcp.md", partial(options, McpOptions, "mcp")),
    "Option of serve": (DOCS / "serve.md", partial(options, ServeOptions, "serve")),
    "Option of watch": (DOCS / "watch.md", partial(options, WatchOptions, "watch")),
    "Option of train": (DOCS / "training.md", partial(options, TrainOptions, "train")),
}
"""The page and the rows of each table, by the title of its first column."""


def replaced(text: str, first_of: str, rows: list[list[str]]) -> str:
    """`text` with `rows` in the table whose first column is titled `first_of`."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    below = re.compile(rf"(^\| {first_of} \|.*\n\|[-|]+\n)((?:\|.*\n)+)", re.M)
    found, count = below.subn(lambda match: match[1] + "\n".join(lines).replace("|  |", "| |") + "\n", text)
    assert count == 1
    return found


def main() -> None:
    """Write the tables."""
    for title, (page, rows) in TABLES.items():
        page.write_text(replaced(page.read_text(), title, rows()))


if __name__ == "__main__":
    main()
