"""The tables with the output of `reshard support` in pages. `python -m tests.tables` rewrites them."""

from __future__ import annotations

import re
from pathlib import Path

from reshard.cli.support import NOT_TESTED, support

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


TABLES = {"Family": (DOCS / "families.md", families), "Model": (DOCS / "add-a-family.md", undeclared)}
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
