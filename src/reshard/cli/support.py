"""`reshard support`."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table

from reshard.cli.console import common_options, handles_errors, print_json, stdout


@click.command("support")
@common_options
@handles_errors
def command(json_output: bool) -> None:
    """List the formats and families that reshard knows."""
    content = support()
    if json_output:
        print_json(content)
        return
    console = stdout()
    table = Table("format", "what it is", "read", "written")
    for row in content["formats"]:
        table.add_row(
            row["name"], row["what"], "yes" if row["read"] else "no", "yes" if row["written"] else "no"
        )
    console.print(table)
    table = Table("family", "architecture", "the same under another name")
    for row in content["families"]:
        table.add_row(row["name"], row["architecture"], ", ".join(row["aliases"]))
    console.print(table)


def support() -> dict[str, list[dict[str, Any]]]:
    """Formats and families, as `support --json` prints them."""
    from reshard.families import FAMILIES
    from reshard.formats import FORMATS
    from reshard.planning import TARGETS

    formats = [
        {"name": name, "what": module.WHAT, "read": True, "written": name in TARGETS}
        for name, module in FORMATS.items()
    ]
    families = [
        {"name": name, "architecture": family.architecture, "aliases": [*family.aliases]}
        for name, family in FAMILIES.items()
    ]
    return {"formats": formats, "families": families}
