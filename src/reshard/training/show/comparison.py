"""`reshard report`: draw the page of one run again, or of several runs in the same charts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from reshard.base.errors import Problem, ReshardError
from reshard.base.plain import json_of
from reshard.guard.complete import RECORD
from reshard.pages.writing import in_the_way, write_page
from reshard.stores import realpath
from reshard.training.show.monitor import METRICS
from reshard.training.show.report import REPORT, Shown, page, shown_of


def _written_for(folder: Path) -> Path | None:
    """The output of the run whose record is in a folder: checkpoints and the final folder have a copy of it."""
    try:
        record = json_of((folder / RECORD).read_bytes())
    except (OSError, ValueError):
        return None
    output = record.get("output") if isinstance(record, dict) else None
    return realpath(Path(output)) if isinstance(output, str) else realpath(folder)


SEVERAL = "runs.html"
"""Default path of the page of several runs."""


def draw(outputs: Sequence[Path], path: Path | None = None) -> tuple[Path, list[Shown]]:
    """Draw the runs with these outputs on one page. Returns its path, and the runs.

    Raises ReshardError if an output is not that of a run, or if the path is taken by something else.
    """
    outputs = list(dict.fromkeys(outputs))
    where = path or (outputs[0] / REPORT if len(outputs) == 1 else Path(SEVERAL))
    problems = [*_no_runs(outputs)]
    if path or not problems:  # the default path lies in the folder of a run
        problems += in_the_way(where, "--output")
    if problems:
        raise ReshardError(problems)
    names = Counter(realpath(output).name for output in outputs)
    shown = []
    for output in outputs:
        name = realpath(output).name
        shown.append(replace(shown_of(output), name=name if names[name] == 1 else str(output)))
    return write_page(where, page(shown), "--output"), shown


def _no_runs(outputs: Sequence[Path]) -> Iterator[Problem]:
    for output in outputs:
        if (output / METRICS).is_file():
            continue
        if (run := _written_for(output)) not in (None, realpath(output)):
            yield Problem(
                "report-part-of-run",
                "this folder is part of a training run",
                file=str(output),
                found=f"{RECORD} of the run in {run}",
                remedy=f"pass {run}",
            )
        elif not run:
            yield Problem(
                "report-no-run",
                "not the output of a training run",
                file=str(output),
                expected=f"a folder with {RECORD} and {METRICS}, written by `reshard train … -o`",
                found="a folder without them"
                if output.is_dir()
                else "a file"
                if output.exists()
                else "nothing",
                remedy="pass the folder of the run's -o",
            )
