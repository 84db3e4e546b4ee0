"""`reshard install-completion`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import click
from click.shell_completion import get_completion_class

from reshard.base.errors import ReshardError
from reshard.base.options import About
from reshard.base.values import choice
from reshard.cli.console import common_options, handles_errors, print_json
from reshard.cli.options import ValueType
from reshard.cli.record import record_options
from reshard.cli.usage import Command

VARIABLE = "_RESHARD_COMPLETE"
"""The variable that the scripts set when a shell asks for completions; click reads it."""


class Place(NamedTuple):
    """The file that a shell reads completions from, and the line that its startup file may need to find it."""

    file: Path
    startup: Path
    line: str
    enough: str
    """Text by which a startup file is known to need no line."""


def _completion_place(shell: str) -> Place:
    home = Path.home()
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    if shell == "bash":
        file = data / "bash-completion/completions/reshard"
        return Place(file, home / ".bashrc", f". {file}", "bash_completion")
    if shell == "zsh":
        startup = Path(os.environ.get("ZDOTDIR") or home) / ".zshrc"
        line = "fpath=(~/.zfunc $fpath); autoload -Uz compinit && compinit"
        return Place(home / ".zfunc/_reshard", startup, line, ".zfunc")
    return Place(config / "fish/completions/reshard.fish", config / "fish/config.fish", "", "")


SHELLS = ("bash", "zsh", "fish")


def script(shell: str) -> str:
    """The completion script of `reshard` for a shell."""
    from reshard.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    return kind.source_template % kind(cli, {}, "reshard", VARIABLE).source_vars()


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Options of the command."""

    only_print: Annotated[
        bool, About("Print the completion script instead of installing it.", flag="--print")
    ] = False


@click.command("install-completion", cls=Command)
@click.argument("shell", required=False, metavar="[SHELL]", type=ValueType(choice(SHELLS)))
@record_options(Flags)
@common_options
@handles_errors
def command(shell: str | None, *, json_output: bool, options: Flags) -> None:
    """Install completion of commands, options, values and paths for a SHELL: bash, zsh or fish.

    Without SHELL, installs it for the login shell ($SHELL). Writes one file below your home folder, and never edits
    startup files: if one needs a line, prints that line.

    \b
      reshard install-completion
      reshard install-completion zsh
      reshard install-completion bash --print > reshard.bash
    """
    shell = shell or _login_shell()
    if options.only_print:
        click.echo(script(shell), nl=False)
        return
    place = _completion_place(shell)
    place.file.parent.mkdir(parents=True, exist_ok=True)
    place.file.write_text(script(shell), encoding="utf-8")
    startup = place.startup.read_text(errors="replace") if place.line and place.startup.is_file() else ""
    needed = place.line if place.enough not in startup and place.line not in startup else ""
    if json_output:
        print_json({"shell": shell, "file": str(place.file), "startup": str(place.startup), "line": needed})
        return
    click.echo(f"wrote {place.file}")
    if needed:
        click.echo(f"add this line to {place.startup}:\n  {needed}")
    click.echo(f"start a new {shell} to use it")


def _login_shell() -> str:
    name = Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        raise ReshardError(
            "shell-unknown",
            "completion is available for bash, zsh and fish only",
            found=f"SHELL={os.environ['SHELL']}" if os.environ.get("SHELL") else "SHELL is not set",
            remedy="pass the shell: reshard install-completion bash",
        )
    return name
