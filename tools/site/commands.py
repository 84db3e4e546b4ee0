"""The help of every command as a page of the site.

(mkdocs-click prints click's placeholder for a default that is not set, and fills examples like prose.)
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from tools.man_pages import contexts

HEAD = """\
# Commands

The help of each command, as `--help` prints it. [Command line](../command-line.md) has what they share.
"""


def page() -> str:
    """The page in Markdown."""
    return "\n".join([HEAD, *(line for ctx in contexts() for line in _command(ctx))])


def _command(ctx: click.Context) -> Iterator[str]:
    command = ctx.command
    yield f"## {ctx.command_path}\n"
    usage = " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])
    yield f"```text\n{usage}\n```\n"
    yield from _paragraphs(inspect.cleandoc(command.help or ""))
    options = [each for each in command.get_params(ctx) if isinstance(each, click.Option)]
    rows = [record for each in options if (record := each.get_help_record(ctx))]
    if rows:
        yield "| Option | Description |\n|---|---|"
    for option, text in rows:
        yield f"| `{option}` | {_code(text)} |"
    yield ""


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs of prose, and those after a \\b, whose lines stay as they are, as code."""
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.startswith("\b"):
            yield f"```text\n{inspect.cleandoc(paragraph.strip(chr(8)))}\n```\n"
        else:
            yield f"{_code(' '.join(paragraph.split()))}\n"


def _code(text: str) -> str:
    """Flags as code; outside of code, a word in brackets or angles is text, and a bar does not end a cell."""
    marked = re.sub(r"(?<![\w`-])--?[a-zA-Z][\w-]*", lambda flag: f"`{flag[0]}`", text)
    parts = marked.split("`")
    parts[::2] = [re.sub(r"([\[\]<>*_|])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)
