"""Why a run failed: the rank that failed first, its traceback, the doctor's diagnosis, and how to continue."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from reshard.base.errors import Problem
from reshard.base.shown import escape, escape_lines
from reshard.diagnosis.diagnosis import combined
from reshard.diagnosis.environment import diagnose_environment
from reshard.diagnosis.failures import is_consequence
from reshard.diagnosis.finding import Finding
from reshard.diagnosis.log import Line, Log, Traceback, read_log
from reshard.diagnosis.logs import LARGEST, UNKNOWN, diagnose_text
from reshard.diagnosis.match import first_failure
from reshard.diagnosis.scripts import diagnose_script
from reshard.diagnosis.spelling import Usage, spelled
from reshard.diagnosis.words import aside
from reshard.training.launching.places import Place
from reshard.training.launching.provenance import words_of
from reshard.training.rewards import named
from reshard.training.run import Run
from reshard.training.show.monitor import last_checkpoint
from reshard.training.worker import PROBLEMS

FRAMES = 6
"""Frames of a traceback that are shown, counted from its end."""
LAST_LINES = 8
"""Lines of the log that are shown if no rank left a traceback."""
CLAIM = ".failed"
"""Under a foreign launcher, the first rank that fails makes this file, so that the others do not report it again."""
FULL = 1 << 20
"""Free bytes below which no checkpoint fits on a disk."""
SOME_RANK = "a rank"
"""A rank of which the log does not tell the number."""
GRACE = 2.0
"""Seconds that a rank waits for another rank to report the failure by which this one ended."""
LABELS = {"en": ("error: ", "why", "cure"), "zh": ("错误：", "原因", "解法")}


@dataclass(frozen=True)
class Failure:
    """A failure: the rank that failed first, lines to show, and the doctor's findings, the cause first."""

    who: str
    shown: tuple[str, ...]
    findings: tuple[Finding, ...]

    def as_dict(self, language: str = "en") -> dict[str, Any]:
        """For `metrics.jsonl`, with the first finding only."""
        told = [_row(each, language) for each in self.findings[:1]]
        return {"who": f"{self.who} failed first", "shown": list(self.shown), "problems": told}


def _row(finding: Finding, language: str) -> dict[str, Any]:
    told = finding.told(language)
    return {
        "code": finding.code,
        "certainty": finding.certainty,
        "title": told["title"],
        "cause": told["cause"] if finding.code != UNKNOWN else "",  # if unknown, it is the traceback
        "cure": told["cure"],
        "places": [f"{place}  {place.text}" for place in finding.places if place.target.endswith(".py")],
    }


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


def read_failure(log: Path, run: Run) -> Failure:
    """The failure in the log of all ranks of a run."""
    with log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - LARGEST, 0))
        content = file.read().decode("utf-8", "replace")
    failure = failure_in(str(log), content, run)
    return _of_full_disk(failure, run) if shutil.disk_usage(run.output).free < FULL else failure


def _of_full_disk(failure: Failure, run: Run) -> Failure:
    """A failure on a full disk: ranks and torchrun cannot record why they fail, and stumble over empty files."""
    words = f"OSError: {OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run.output))}"
    findings = tuple(diagnose_text("the disk", words, Usage({"reshard"})))
    shown = failure.shown if failure.who != SOME_RANK else ()
    return Failure(failure.who, (*shown, words), findings)


def failure_in(name: str, content: str, run: Run) -> Failure:
    """The failure in a text called `name`."""
    log = read_log(name, content)
    root = first_failure(log)
    findings = tuple(_explained(diagnose_text(name, content, Usage({"reshard"})), run))
    if root is None or is_consequence(root):
        silent = _silent(content, log)
        if silent:
            return Failure(f"rank {silent[0]}", tuple(_last_words(log, *silent)), findings)
    if root is None:
        return Failure(SOME_RANK, tuple(_last(log.lines)), findings)
    return Failure(_who(root, content), tuple(_short(root.root)), findings)


_EXIT = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-?\d+) ")
"""A failed rank in torchrun's summary (torch.distributed.elastic.multiprocessing.errors)."""


def _silent(content: str, log: Log) -> tuple[str, int] | None:
    """The rank that ended without a traceback, and its exit code; signals first. torchrun itself sends SIGTERM."""
    own = (-signal.SIGTERM, 128 + signal.SIGTERM)
    ended = {rank: int(code) for rank, code in _EXIT.findall(content) if int(code) not in own}
    spoke = {each.stream.split("/")[-1] for each in log.tracebacks}
    silent = [(rank, code) for rank, code in ended.items() if code < 0 or rank not in spoke]
    return min(silent, key=lambda each: each[1]) if silent else None


def _last_words(log: Log, rank: str, code: int) -> Iterator[str]:
    """How a rank without a traceback ended, and its last lines."""
    own = [line for line in log.lines if line.stream.split("/")[-1] == rank]
    yield from _last(own)
    yield (
        f"killed by {signal_name(-code)}"
        if code < 0
        else f"ended with exit status {code}, without a traceback"
    )


def _last(lines: list[Line]) -> list[str]:
    return [line.text for line in lines if line.text.strip() and not _NOISE.search(line.text)][-LAST_LINES:]


_NOISE = re.compile(r"\d%\|.*\|.*\[|\w+Warning: |^\s*warnings\.warn\(")
"""Progress bars and warnings."""


def signal_name(number: int) -> str:
    """The name of a signal, as SIGKILL for 9, and what it usually means."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    hint = ", which the kernel sends when memory runs out" if number == signal.SIGKILL else ""
    return f"{name}{hint}"


def _explained(findings: list[Finding], run: Run) -> list[Finding]:
    """The findings in the log, combined with related ones about this machine and the reward scripts."""
    shown = {finding.code for finding in findings}
    scripts = [named(each).file for each in run.reward]
    of_script = [found for script in scripts if script.is_file() for found in diagnose_script(str(script))]
    both = spelled(combined([*findings, *diagnose_environment(), *of_script]), Usage({"reshard"}))
    return [finding for finding in both if finding.code in shown or shown & set(finding.also)]


_LAUNCHER = re.compile(
    r"^<frozen|distributed/(?:elastic/|run\.py|c10d_logger\.py)|reshard/train(?:ing)?/(?:worker|launch)\.py| <module>$"
)
"""Frames that occur in every traceback."""


def _who(root: Traceback, content: str) -> str:
    """The rank of a traceback. The number before torchrun's own lines is its process."""
    rank = root.stream.split("/")[-1]
    label = rank.isdecimal() and re.search(rf"^\[(?:default|rank){rank}\]:", content, re.MULTILINE)
    return f"rank {rank}" if label else SOME_RANK


def _short(root: Traceback) -> Iterator[str]:
    """The last frames, without the path of site-packages, and the exception."""
    for frame in [frame for frame in root.frames if not _LAUNCHER.search(frame)][-FRAMES:]:
        yield "  " + re.sub(r"^.*/(?:site|dist)-packages/", "", frame)
    yield f"{root.exception}: {root.message}" if root.message else root.exception


def print_failure(run: Run, log: Path, console: Console, language: str = "en") -> Failure:
    """Print why the ranks of a run failed, from their log; the cause and its cure come last."""
    failure = read_failure(log, run)
    _print(run, failure, console, language, f"all that the ranks printed: {log}")
    return failure


def print_exception(
    run: Run, place: Place, error: Exception, console: Console, language: str = "en"
) -> Failure | None:
    """Print why this rank failed, under a foreign launcher; one line if it only lost another rank.

    Returns the failure if this rank is the first to report it, else None.
    """
    words = "".join(traceback.format_exception(error))
    failure = failure_in("this rank", words, run)
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
    error, why, cure = LABELS[language]
    console.print(f"\n[bold red]{escape(failure.who)} failed first[/]")
    for line in "\n".join(failure.shown).split("\n"):
        console.print(f"  {escape_lines(line)}")
    if where:
        console.print(escape(where))
    print_way_on(run, console, place)
    for finding in failure.findings[:1]:
        title = escape(finding.message.of(language))
        console.print(f"[bold red]{error}[/][bold]{title}[/] {aside(finding).of(language)}")
        for shown in (shown for shown in finding.places if shown.target.endswith(".py")):
            console.print(f"  {escape(str(shown))}  {escape(shown.text)}")
        if finding.code != UNKNOWN:  # the cause of an unknown failure is the traceback above
            console.print(f"[bold]{why}[/] {escape_lines(finding.rule.of(language))}")
        console.print(f"[bold]{cure}[/] {escape_lines(finding.remedy.of(language))}")


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
