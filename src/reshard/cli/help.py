"""`reshard help`."""

from __future__ import annotations

import click

from reshard.cli.usage import Command


@click.command("help", cls=Command)
@click.argument("names", nargs=-1, metavar="[COMMAND …]")
@click.pass_context
def command(ctx: click.Context, names: tuple[str, ...]) -> None:
    """Show the help of a COMMAND, the same as `reshard COMMAND --help`.

    \b
      reshard help convert
      reshard help train sft
    """
    root = ctx.find_root()
    root.command.main([*names, "--help"], prog_name=root.info_name, standalone_mode=False)
