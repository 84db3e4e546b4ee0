"""`reshard inspect`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from reshard import api
from reshard.cli.console import (
    Watch,
    common_options,
    count,
    handles_errors,
    print_json,
    print_problems,
    size,
    stdout,
)
from reshard.cli.options import iteration_option
from reshard.formats.checkpoint import Checkpoint
from reshard.inspection import OPTIMIZER, Inspection
from reshard.shown import escape


@click.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@iteration_option("Which step of a run; the one that its tracker names by default.")
@common_options
@handles_errors
def command(path: Path, iteration: int | str | None, json_output: bool) -> None:
    """Say what the checkpoint at PATH is, whether it is whole, and what to type next.

    Reads headers and metadata only. Exit status: 0 whole, 1 problems were found, 2 nothing could be opened.
    """
    with Watch("inspect", quiet=json_output) as watch:
        found = api.inspect(path, iteration, on_step=watch.step)
    if json_output:
        print_json(found.as_dict())
    else:
        _print(found)
    sys.exit(0 if found.whole else 1)


def _quantized(checkpoint: Checkpoint) -> str:
    found = checkpoint.quantization
    if found is None:
        return ""
    return f"{found}: {len(found.weights)} weights" if found.weights else str(found)


def _print(found: Inspection) -> None:
    console, c = stdout(), found.checkpoint
    rows = {
        "path": str(c.path),
        "format": f"{c.format} ({c.variant})" if c.variant else c.format,
        "family": found.family or "not known",
        "layout": _layout(found),
        "iteration": "" if c.iteration is None else str(c.iteration),
        "weights": f"{count(c.parameters)} parameters in {len(c.tensors)} tensors, {size(c.nbytes)}",
        "carried": "; ".join(
            f"{prefix}* {count(part['parameters'])} parameters in {part['tensors']} tensors"
            for prefix, part in found.carried.items()
        ),
        "dtypes": ", ".join(f"{name} × {number}" for name, number in sorted(c.dtypes.items())),
        "quantized": _quantized(c),
        "optimizer": f"yes, {size(c.dropped[OPTIMIZER])}" if c.dropped[OPTIMIZER] else "",
    }
    for name, value in rows.items():
        if value:
            console.print(f"[bold]{name:<10}[/] {escape(value)}")
    for note in [*found.notes, *found.hints]:
        console.print(f"[bold]{'note':<10}[/] {escape(note)}")
    print_problems(found.problems, console)
    if found.next:
        console.print(f"[bold]{'next':<10}[/] {escape(found.next)}")


def _layout(found: Inspection) -> str:
    """What is recorded, and what is not; names of the hub belong to no ranks."""
    checkpoint = found.checkpoint
    if checkpoint.dialect == "hf":
        return ""
    recorded, unrecorded = str(checkpoint.layout), checkpoint.layout.unrecorded
    if not recorded:
        return "not recorded"
    return f"{recorded} ({', '.join(unrecorded)} not recorded)" if unrecorded else recorded
