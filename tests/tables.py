"""The tables with the output of `reshard support` in pages. `python -m tests.tables` rewrites them."""

from __future__ import annotations

import re
from pathlib import Path

from reshard.cli.support import NOT_JUDGED, support

REPOSITORY = Path(__file__).parents[1]
READMES = {REPOSITORY / "README.md": NOT_JUDGED, REPOSITORY / "README.zh-CN.md": "未验证"}
GUIDE = REPOSITORY / "docs" / "add-a-family.md"


def families(not_judged: str) -> list[list[str]]:
    """The cells of the table of families; `not_judged` is the page's text for a family without a judge."""
    return [
        [
            f"`{row['name']}`",
            row["architecture"],
            row["engine"],
            ", ".join(row["judged"]) or not_judged,
            ", ".join(f"`{alias}`" for alias in row["aliases"]),
        ]
        for row in support()["families"]
    ]


def undeclared() -> list[list[str]]:
    """The cells of the table of undeclared models."""
    return [[f"`{row['name']}`", row["why"]] for row in support()["undeclared"]]


def replaced(text: str, first_of: str, rows: list[list[str]]) -> str:
    """`text` with `rows` in the table whose first column is titled `first_of`."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    below = re.compile(rf"(^\| (?:{first_of}) \|.*\n\|[-|]+\n)((?:\|.*\n)+)", re.M)
    found, count = below.subn(lambda match: match[1] + "\n".join(lines).replace("|  |", "| |") + "\n", text)
    assert count == 1
    return found


def main() -> None:
    """Write the tables."""
    for page, not_judged in READMES.items():
        page.write_text(replaced(page.read_text(), "Family|模型族", families(not_judged)))
    GUIDE.write_text(replaced(GUIDE.read_text(), "Model", undeclared()))


if __name__ == "__main__":
    main()
