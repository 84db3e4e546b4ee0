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
    table = Table("family", "architecture", "computed by", "judged by", "the same under another name")
    for row in content["families"]:
        judges = ", ".join(row["judged"]) or NOT_JUDGED
        table.add_row(row["name"], row["architecture"], row["engine"], judges, ", ".join(row["aliases"]))
    console.print(table)
    table = Table("not converted to Megatron-Core", "why")
    for row in content["undeclared"]:
        table.add_row(row["name"], row["why"])
    console.print(table)


NOT_JUDGED = "not judged"


def support() -> dict[str, list[dict[str, Any]]]:
    """Formats, families, and known models that are no family, as `support --json` prints them."""
    from reshard.families import FAMILIES
    from reshard.families.family import ENGINES, JUDGES
    from reshard.families.undeclared import BEYOND_MEGATRON, BUILT_ALIKE
    from reshard.formats import FORMATS

    formats = [
        {"name": each.name, "what": each.what, "read": True, "written": each.target is not None}
        for each in FORMATS.values()
    ]
    families = [
        {
            "name": name,
            "architecture": family.architecture,
            "engine": ENGINES[family.computed_by],
            "judged": [JUDGES[judge] for judge in family.judged],
            "carried": [part.hub for part in family.within.carried] if family.within else [],
            "aliases": [*family.aliases],
        }
        for name, family in FAMILIES.items()
    ]
    undeclared = sorted((BEYOND_MEGATRON | BUILT_ALIKE).items())
    return {
        "formats": formats,
        "families": families,
        "undeclared": [{"name": name, "why": why} for name, why in undeclared],
    }
