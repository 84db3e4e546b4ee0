"""`reshard mcp`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import click

from reshard.base.options import About
from reshard.cli.console import common_options, handles_errors, print_json
from reshard.cli.record import record_options
from reshard.cli.usage import Command
from reshard.runs.mcp.options import ServerOptions

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@dataclass(frozen=True, kw_only=True)
class Flags(ServerOptions):
    """Options of the command."""

    skill: Annotated[bool, About("Print a skill file for coding agents, and exit.")] = False


@click.command("mcp", cls=Command)
@click.argument("folders", nargs=-1, type=FOLDER, metavar="FOLDER …")
@record_options(Flags)
@common_options
@handles_errors
def command(folders: tuple[Path, ...], *, json_output: bool, options: Flags) -> None:
    """Let coding agents inspect checkpoints and failed runs below each FOLDER.

    A server of the Model Context Protocol, which agents start themselves and talk to over standard input and output.
    Its tools are inspect, verify, plan (of a conversion), facts (of a failed run), api_history and compare. They only
    read, only below FOLDER, and follow no links out of it. Needs the package mcp, from the extra reshard[mcp].

    \b
      claude mcp add reshard -- reshard mcp ~/runs ~/models    for Claude Code
      codex mcp add reshard -- reshard mcp ~/runs              for Codex
      reshard mcp --skill                                      a skill file: when to use which tool
    """
    if options.skill:
        text = files("reshard.runs.mcp").joinpath("skill.md").read_text(encoding="utf-8")
        print_json({"skill": text}) if json_output else click.echo(text, nl=False)
        return
    if not folders:
        raise click.UsageError("name the folders that the tools may read: reshard mcp FOLDER …")
    import mcp  # noqa: F401  # the first to be missing, so that it is named

    from reshard.runs.mcp.server import Server

    if sys.stdin.isatty():
        click.echo("waiting for a client on standard input; Ctrl-C ends", err=True)
    Server(folders, options).start()
