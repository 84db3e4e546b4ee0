"""`reshard support`."""

from __future__ import annotations

from typing import Any

import click

from reshard.cli.console import common_options, handles_errors, print_json, stdout
from reshard.cli.tables import print_table
from reshard.cli.usage import Command


@click.command("support", cls=Command)
@common_options
@handles_errors
def command(json_output: bool) -> None:
    """List the formats and families that reshard knows."""
    content = support()
    if json_output:
        print_json(content)
        return
    console = stdout()
    formats = [
        (
            each["name"],
            each["what"],
            *("yes" if each[way] else "no" for way in ("read", "written")),
            ", ".join(each["aliases"]),
        )
        for each in content["formats"]
    ]
    families = [
        (
            each["name"],
            each["architecture"],
            each["engine"],
            ", ".join(each["judged"]) or NOT_JUDGED,
            ", ".join(each["aliases"]),
        )
        for each in content["families"]
    ]
    print_table(console, ("format", "what it is", "read", "written", "also named"), formats)
    console.print()
    print_table(console, ("family", "architecture", "computed by", "judged by", "also named"), families)
    console.print()
    undeclared = [(each["name"], each["why"]) for each in content["undeclared"]]
    print_table(console, ("not converted to Megatron-Core", "why"), undeclared)


NOT_JUDGED = "not judged"


def support() -> dict[str, list[dict[str, Any]]]:
    """Formats, families, and known models that are no family, as `support --json` prints them."""
    from reshard.families import FAMILIES
    from reshard.families.family import ENGINES, JUDGES
    from reshard.families.undeclared import BEYOND_MEGATRON, BUILT_ALIKE
    from reshard.formats import FORMATS

    formats = [
        {
            "name": each.name,
            "what": each.what,
            "read": True,
            "written": each.target is not None,
            "aliases": [*each.aliases],
        }
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
