"""`reshard inspect`."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click

from reshard.api import inspection
from reshard.base.errors import ReshardError
from reshard.base.foreign_text import escape
from reshard.base.options import AGE, About
from reshard.base.quantities import size
from reshard.base.values import SECONDS_OF_UNITS
from reshard.cli.console import (
    Watch,
    common_options,
    handles_errors,
    print_json,
    print_problems,
    stdout,
)
from reshard.cli.options import SOURCE, quiet_option
from reshard.cli.record import record_options
from reshard.cli.usage import Command
from reshard.commands.inspection import Inspection
from reshard.stores import StorePath
from reshard.transfer.leftovers import SetAside, Unfinished, set_aside
from reshard.transfer.uploading import remove_unfinished_at, unfinished_at


@dataclass(frozen=True, kw_only=True)
class Flags(inspection.InspectOptions):
    """Options of the command."""

    remove_unfinished: Annotated[
        float | None,
        About(
            "Remove unfinished conversions to PATH that made no progress for this long, for example 12h or 7d.",
            "AGE",
            unit=AGE,
        ),
    ] = None


@click.command("inspect", cls=Command)
@click.argument("paths", nargs=-1, required=True, type=SOURCE, metavar="PATH …")
@record_options(Flags)
@quiet_option("Print problems only.")
@common_options
@handles_errors
def command(paths: tuple[Path, ...], *, quiet: bool, json_output: bool, options: Flags) -> None:
    """Show what the checkpoint at each PATH is, whether it is complete, and what to type next.

    Reads headers and metadata only. PATH can be a URL, or Org/Model on the Hub. Also lists unfinished conversions to
    PATH, with the commands that continue them, and folders that a killed run had moved aside to replace them.
    --json prints an object, or an array of objects for several paths.

    Exit status: 0 complete, 1 problems were found, 2 a PATH cannot be opened.
    """
    if options.html and len(paths) > 1:
        raise click.UsageError("--html writes the page of one checkpoint: pass one PATH")
    reports, status = [], 0
    for number, path in enumerate(paths):
        if number and not (quiet or json_output):
            stdout().print()
        try:
            report, code = _report(path, options, quiet=quiet, json_output=json_output)
        except ReshardError as error:
            if len(paths) == 1:
                raise
            print_problems(error.problems)
            report, code = {"path": str(path), **_problems(error)}, 2
        reports.append(report)
        status = max(status, code)
    if json_output:
        print_json(reports[0] if len(paths) == 1 else reports)
    sys.exit(status)


def _problems(error: ReshardError) -> dict[str, Any]:
    return {"problems": [problem.as_dict() for problem in error.problems]}


def _report(path: Path, options: Flags, *, quiet: bool, json_output: bool) -> tuple[dict[str, Any], int]:
    """The JSON for one path, and the exit status; also prints it as text unless `json_output`."""
    age = options.remove_unfinished
    removed = remove_unfinished_at(path, age) if age is not None else []
    left = unfinished_at(path)
    is_inside = isinstance(path, StorePath)  # a store keeps unfinished runs inside the destination
    old = [] if is_inside else set_aside(path)
    leftovers = {
        "unfinished": [each.as_dict() for each in left],
        "set_aside": [each.as_dict() for each in old],
        "removed": [str(each.folder) for each in removed],
    }
    if not (json_output or quiet):
        _print_unfinished(left, removed)
        _print_set_aside(old)
    if (left or removed or old) and (is_inside or not path.exists()):
        return {"path": str(path), **leftovers}, 1 if left or old else 0
    with Watch("inspect", quiet=json_output or quiet) as watch:
        result = inspection.inspect(path, options.iteration, html=options.html, on_step=watch.step)
    if quiet:
        print_problems(result.problems)
    elif not json_output:
        _print(result)
    return {**result.as_dict(), **leftovers}, 0 if result.whole else 1


def _print_unfinished(left: list[Unfinished], removed: list[Unfinished]) -> None:
    console = stdout()
    for each in removed:
        console.print(f"[bold]{'removed':<10}[/] {escape(str(each.folder))}")
    for each in left:
        done = "" if each.nbytes is None else f"{size(each.nbytes)} of {size(each.total or 0)} written, "
        state = "running now" if each.live else f"no progress for {_duration(time.time() - each.modified)}"
        console.print(f"[bold]{'unfinished':<10}[/] {escape(str(each.folder))}: {done}{state}")
        if each.command and not each.live:
            console.print(f"[bold]{'continue':<10}[/] {escape(each.command)}")


def _print_set_aside(old: list[SetAside]) -> None:
    console = stdout()
    for each in old:
        what = "what was here before a run replaced it"
        console.print(f"[bold]{'set aside':<10}[/] {escape(str(each.folder))}: {what}")
        for name, command in (("put back", each.put_back), ("remove", each.remove)):
            if command:
                console.print(f"[bold]{name:<10}[/] {escape(command)}")


def _duration(seconds: float) -> str:
    """A duration as text, in the largest unit of which it has at least one."""
    unit = next((unit for unit in "dhm" if seconds >= SECONDS_OF_UNITS[unit]), "s")
    return f"{max(seconds, 0) / SECONDS_OF_UNITS[unit]:.0f} {unit}"


def _print(inspection: Inspection) -> None:
    console = stdout()
    for name, value in inspection.rows().items():
        console.print(f"[bold]{name:<10}[/] {escape(value)}")
    for note in [*inspection.notes, *inspection.hints]:
        console.print(f"[bold]{'note':<10}[/] {escape(note)}")
    print_problems(inspection.problems, console)
    if inspection.next:
        console.print(f"[bold]{'next':<10}[/] {escape(inspection.next)}")
