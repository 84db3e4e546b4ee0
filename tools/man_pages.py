"""Man pages of all commands, made from their help: `python -m tools.man_pages` writes docs/man.

A test checks that they match the help. The wheel installs them in `share/man`, where `man reshard-convert`
finds them. (click-man does not support groups that load their commands late, nor lines of examples.)
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from reshard.base.options import COMMON
from reshard.cli import COMMANDS, cli
from reshard.cli.usage import sections
from reshard.version import __version__

FOLDER = Path(__file__).parents[1] / "docs/man"
EXAMPLE = re.compile(r"^(?P<indent> *)(?P<command>\S.*\S) {2,}(?P<text>\S+(?: \S+)*)$")
"""A command, and after two spaces what it is for."""


def pages() -> dict[str, str]:
    """The text of each page, by file name."""
    names = {ctx.command_path.replace(" ", "-"): ctx for ctx in contexts()}
    return {f"{name}.1": "\n".join([*_page(ctx, name), ""]) for name, ctx in names.items()}


def contexts(ctx: click.Context | None = None) -> Iterator[click.Context]:
    """A command's context and those of the commands below it, `reshard` itself by default."""
    ctx = ctx or click.Context(cli, info_name="reshard", **cli.context_settings)
    yield ctx
    if isinstance(ctx.command, click.Group):
        for name in ctx.command.list_commands(ctx):
            command = ctx.command.get_command(ctx, name)
            assert command is not None
            yield from contexts(click.Context(command, info_name=name, parent=ctx))


def _page(ctx: click.Context, name: str) -> Iterator[str]:
    command = ctx.command
    summary = COMMANDS.get(str(ctx.info_name)) or command.get_short_help_str(120)
    yield f'.TH "{name.upper()}" "1" "" "reshard {__version__}" "reshard manual"'
    yield from (".SH NAME", f"{_escaped(name)} \\- {_escaped(summary.rstrip('.'))}")
    usage = " ".join(command.collect_usage_pieces(ctx))
    yield from (".SH SYNOPSIS", f".B {_escaped(ctx.command_path)}", _escaped(usage))
    yield from (".SH DESCRIPTION", *_paragraphs(inspect.cleandoc(command.help or "")))
    for heading, rows in sections(command.params, ctx).items():
        yield ".SH OPTIONS" if heading == COMMON else f".SS {_escaped(heading)}"
        for option, text in rows:
            yield from (".TP", f"\\fB{_escaped(option)}\\fR", _escaped(text))
    others = command.list_commands(ctx) if isinstance(command, click.Group) else []
    if others:
        yield ".SH COMMANDS"
    for each in others:
        child = command.get_command(ctx, each) if isinstance(command, click.Group) else None
        told = COMMANDS.get(each) if ctx.parent is None else child and child.get_short_help_str(120)
        yield from (".TP", f"\\fB{_escaped(f'{name}-{each}')}\\fR(1)", _escaped(str(told)))
    if ctx.parent is not None:
        above = ctx.parent.command_path.replace(" ", "-")
        yield from (".SH SEE ALSO", f"\\fB{_escaped(above)}\\fR(1)")


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs that man fills, and those after a \\b, which stay unchanged: examples with their explanations."""
    for number, paragraph in enumerate(re.split(r"\n\s*\n", text)):
        kept = paragraph.startswith("\b")
        lines = paragraph.strip("\b\n").splitlines()
        if number:
            yield ".PP"
        if not kept:
            yield from map(_escaped, lines)
            continue
        yield from (".nf", ".RS 2")
        for line in lines:
            match = EXAMPLE.match(line)
            yield f"\\fB{_escaped(match['command'].strip() if match else line.strip())}\\fR"
            if match:
                yield f"    {_escaped(match['text'])}"
        yield from (".RE", ".fi")


def _escaped(text: str) -> str:
    """Text in which roff finds no requests, and may break after a bar; dashes can be copied into a shell."""
    plain = (
        text.replace("\\", "\\e")
        .replace("-", "\\-")
        .replace("|", "|\\:")
        .replace("…", "\\[u2026]")
        .replace("·", "\\[pc]")
    )
    return f"\\&{plain}" if plain[:1] in (".", "'") else plain


def main() -> None:
    """Write all pages, and remove those of commands that no longer exist."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = pages()
    for path in FOLDER.glob("*.1"):
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
