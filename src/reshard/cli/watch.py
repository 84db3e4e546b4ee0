"""`reshard watch`."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path
from threading import Event
from typing import Any

import click

from reshard.base.errors import Problem, listed
from reshard.base.foreign_text import escape, printable_json, printable_line, strict
from reshard.base.interrupts import raising
from reshard.base.values import Kind
from reshard.cli.console import (
    ENDING,
    Interrupted,
    common_options,
    handles_errors,
    print_problems,
    stderr,
    typed,
)
from reshard.cli.options import LOCAL
from reshard.cli.record import record_options
from reshard.cli.usage import Command
from reshard.commands.names import NAMES
from reshard.runs.follow.options import WatchOptions

COMMAND = Kind("str", "a command, with an end of each quote", bool, lambda text: tuple(shlex.split(text)))


class Ended(Interrupted):
    """The user or the system asked the watch to end."""

    def _state_text(self) -> str:
        return "the same command goes on where this one has stopped"


@click.command("watch", cls=Command)
@click.argument("run", type=LOCAL)
@record_options(WatchOptions, {**NAMES, "program": COMMAND})
@common_options
@handles_errors
def command(run: Path, *, json_output: bool, options: WatchOptions) -> None:
    """Follow the training run in the folder RUN, and do something with each step once it is complete.

    Steps of any framework are found, also those that were saved before; the oldest is done first, and each only once,
    also if a watch is ended and started again. Steps that the trainer deletes meanwhile are skipped.

    \b
      reshard watch run --to models --keep 3                        folders that transformers loads
      reshard watch run --to models --run 'eval.sh {path} {step}'   evaluate each step
      reshard watch run --push-to-hub Org/Name                      a branch of the Hub for each step
      reshard watch run --to models --once                          what there is now, for a cron job

    Conversions are those of reshard convert. Each event is a line on stdout; with --json, a line of JSON. What commands
    print goes to stderr. With --to DIR, what is done is recorded in DIR; otherwise in ~/.local/state/reshard.

    Exit status: with --once 0 done, 1 something failed; 128 + N ended by signal N; 2 refused before the start.
    """
    from reshard.runs.follow.follower import follow

    stop = Event()

    def ended(number: int) -> Ended:
        stop.set()
        return Ended(number)

    with raising((signal.SIGINT, *ENDING), ended):
        fine = follow(run, options, _print_line if json_output else _print_text, stop, typed())
    sys.exit(0 if fine else 1)


def _print_line(event: dict[str, Any]) -> None:
    click.echo(printable_json(json.dumps(strict(event))))


def _print_text(event: dict[str, Any]) -> None:
    problems = [Problem(**each) for each in (*event.get("problems", ()), *event.get("warnings", ()))]
    about = ("format", "path", "url", "reason", "command", "status")
    told = [
        shlex.join(each) if key == "command" else f"exit status {each}" if key == "status" else str(each)
        for key in about
        if (each := event.get(key))
    ]
    click.echo(printable_line(": ".join([event["name"], event["event"], *told])))
    print_problems(problems)
    if names := event.get("nonfinite"):
        stderr().print(f"[bold yellow]warning:[/] NaN or Inf in {escape(listed(names, 5))}")
