"""`reshard serve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from reshard.base.foreign_text import escape, escape_lines
from reshard.base.quantities import size
from reshard.cli.console import common_options, handles_errors, stdout
from reshard.cli.options import SOURCE
from reshard.cli.record import record_options
from reshard.cli.usage import Command
from reshard.commands.names import NAMES
from reshard.serve.options import ServeOptions

TEXTS = {
    "listening": "serving at {address} (Ctrl-C ends)\nload with: export HF_ENDPOINT={address}",
    "planned": "{model} {step}: {size}, nothing read yet",
    "refused": "{path}",
    "sent": "{model} {step} {path}: {size} in {seconds:.1f} s",
}


@click.command("serve", cls=Command)
@click.argument("paths", nargs=-1, required=True, type=SOURCE, metavar="PATH …")
@record_options(ServeOptions, NAMES)
@common_options
@handles_errors
def command(paths: tuple[Path, ...], *, json_output: bool, options: ServeOptions) -> None:
    """Show the checkpoints below each PATH as models of a Hugging Face Hub, without converting them.

    Programs that are started with HF_ENDPOINT set to the address load them by name: local/RUN, with a step of the run
    as its revision. The bytes of each file are those that `convert` would write, and are computed on request.
    Nothing is written. Needs the packages starlette and uvicorn, from the extra reshard[serve].

    \b
      reshard serve runs/
      export HF_ENDPOINT=http://127.0.0.1:8765
      hf download local/my-run --local-dir model
      vllm serve local/my-run --revision iter_0000200
    """
    from reshard.serve.repositories import repositories_below
    from reshard.serve.server import address_of, check_paths, listening, serve

    check_paths(paths, options)
    listener = listening(options)
    report = (lambda event: click.echo(json.dumps(event))) if json_output else _print_event
    report(
        {
            "event": "listening",
            "address": address_of(listener),
            "notes": [
                f"models: {', '.join(each.id for each in repositories_below(paths).values()) or 'none yet'}"
            ],
        }
    )
    serve(paths, options, listener, report)


def _print_event(event: dict[str, Any]) -> None:
    told = TEXTS[event["event"]].format_map({**event, "size": size(event.get("bytes", 0))})
    stdout().print(escape_lines(told))
    for note in event.get("notes", ()):
        stdout().print(f"[bold]note:[/] {escape(note)}")
    if event.get("error"):
        stdout().print(f"[bold red]error:[/] {escape_lines(event['error'])}")
