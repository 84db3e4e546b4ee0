"""What a failed or interrupted run prints: why it failed (`reshard.guard.failure`), and how to continue."""

from __future__ import annotations

import shlex
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from reshard.base.errors import Problem
from reshard.base.shown import escape
from reshard.diagnosis.failures import is_consequence
from reshard.diagnosis.log import read_log
from reshard.diagnosis.match import first_failure
from reshard.guard.failure import (
    Failure,
    Seen,
    failure_in,
    print_what,
    print_why,
    read_failure,
    signal_name,
)
from reshard.training.launching.places import Place
from reshard.training.launching.provenance import words_of
from reshard.training.rewards import named
from reshard.training.run import Run
from reshard.training.show.monitor import last_checkpoint
from reshard.training.worker import CLAIM, PROBLEMS

GRACE = 2.0
"""Seconds that a rank waits for another rank to report the failure by which this one ended."""


def refusal(problems: Sequence[Problem]) -> dict[str, Any]:
    """The same for problems because of which ranks refuse to continue."""
    told = []
    for problem in problems:
        about = [str(value) for value in (problem.rule, problem.tensor, problem.file) if value]
        about += [f"expected: {problem.expected}"] if problem.expected else []
        about += [f"found: {problem.found}"] if problem.found else []
        told.append(
            {
                "code": problem.code,
                "title": problem.message,
                "cause": "; ".join(about),
                "cure": problem.remedy or "",
            }
        )
    return {"who": "the run was stopped", "shown": [], "problems": told}


def interruption(how: str) -> dict[str, Any]:
    """The same for a signal."""
    return {"who": how, "shown": [], "problems": []}


def seen_of(run: Run) -> Seen:
    """What is known of a run besides its log."""
    scripts = tuple(named(each).file for each in run.reward)
    return Seen(frozenset({"reshard"}), scripts, run.output)


def print_failure(run: Run, log: Path, console: Console, language: str = "en") -> Failure:
    """Print why the ranks of a run failed, from their log; the cause and its cure come last."""
    failure = read_failure(log, seen_of(run))
    _print(run, failure, console, language, f"all that the ranks printed: {log}")
    return failure


def print_exception(
    run: Run, place: Place, error: Exception, console: Console, language: str = "en"
) -> Failure | None:
    """Print why this rank failed, under a foreign launcher; one line if it only lost another rank.

    Returns the failure if this rank is the first to report it, else None.
    """
    words = "".join(traceback.format_exception(error))
    failure = failure_in("this rank", words, seen_of(run))
    root = first_failure(read_log("", words))
    lost = root is not None and is_consequence(root)
    if not (lost and _another_tells(run)) and _claim(run):
        told = Failure(f"rank {place.rank}", failure.shown, failure.findings)
        _print(run, told, console, language, "", place)
        return told
    console.print(f"rank {place.rank} ended as well: {escape(' '.join(failure.shown[-1:]))}")
    return None


def _another_tells(run: Run) -> bool:
    """Whether the rank whose end made this one fail has reported the failure."""
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        if any((run.output / name).exists() for name in (CLAIM, PROBLEMS)):
            return True
        time.sleep(0.05)
    return False


def _claim(run: Run) -> bool:
    try:
        (run.output / CLAIM).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _print(
    run: Run, failure: Failure, console: Console, language: str, where: str, place: Place | None = None
) -> None:
    print_what(failure, console)
    if where:
        console.print(escape(where))
    print_way_on(run, console, place)
    print_why(failure, console, language)


def print_killed(run: Run, log: Path, number: int, console: Console) -> dict[str, Any]:
    """Print that torchrun was killed from outside, and all ranks with it; no rank failed."""
    who = f"torchrun was killed by {signal_name(number)}"
    console.print(f"\n[bold red]{escape(who)}[/]: all ranks have ended")
    console.print(f"all that the ranks printed: {escape(str(log))}")
    print_way_on(run, console, None)
    return {"who": who, "shown": ["all ranks have ended"], "problems": []}


def print_interruption(run: Run, console: Console, how: str, place: Place | None = None) -> None:
    """Print which signal ended a run, and how to continue it."""
    console.print(f"\n[bold yellow]{escape(how)}[/]")
    print_way_on(run, console, place)


def print_way_on(run: Run, console: Console, place: Place | None) -> None:
    """Print the last complete checkpoint, and the command that continues from it with the launcher of `place`."""
    if run.ranks.node_rank > 0:
        return
    checkpoint = last_checkpoint(run.output)
    if checkpoint is None:
        console.print("no checkpoint was saved; the same command with --overwrite starts again")
        return
    console.print(f"the last checkpoint is complete: {escape(str(checkpoint))}")
    console.print(f"continue from it: {escape(resuming(run, place))}")


def resuming(run: Run, place: Place | None = None) -> str:
    """The command that continues from the last checkpoint."""
    return (f"{place.launcher} … " if place else "") + shlex.join(words_of(run, resume=True))
