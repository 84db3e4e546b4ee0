"""`reshard support`."""

import click

from reshard.api.supported import support
from reshard.cli.console import common_options, handles_errors, print_json, stdout
from reshard.cli.tables import print_table
from reshard.cli.usage import Command


@click.command("support", cls=Command)
@common_options
@handles_errors
def command(json_output: bool) -> None:
    """List the formats, model families and quantized weights that are read and written."""
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
            ", ".join(each["judged"]) or NOT_TESTED,
            ", ".join(each["aliases"]),
        )
        for each in content["formats"]
    ]
    families = [
        (
            each["name"],
            each["architecture"],
            each["engine"],
            ", ".join(each["judged"]) or NOT_TESTED,
            ", ".join(each["aliases"]),
        )
        for each in content["families"]
    ]
    print_table(console, ("format", "what it is", "read", "written", "tested against", "also named"), formats)
    console.print()
    print_table(console, ("family", "architecture", "computed by", "tested against", "also named"), families)
    console.print()
    quantized = [
        (each["tool"], each["what"], each["written"] or "", ", ".join(each["judged"]) or NOT_TESTED)
        for each in content["quantizations"]
    ]
    print_table(console, ("quantized by", "what", "--quantize", "tested against"), quantized)
    console.print()
    undeclared = [(each["name"], each["why"]) for each in content["undeclared"]]
    print_table(console, ("not converted to Megatron-Core", "why"), undeclared)


NOT_TESTED = "not tested"
