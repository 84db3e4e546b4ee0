"""Why a run ended: the rank that failed first, its traceback, what the doctor knows of it, and how to go on."""

from __future__ import annotations

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

from reshard.doctor.diagnosis import combined
from reshard.doctor.environment import diagnose_environment
from reshard.doctor.failures import is_consequence
from reshard.doctor.finding import Finding
from reshard.doctor.log import Line, Log, Traceback, read_log
from reshard.doctor.logs import LARGEST, UNKNOWN, diagnose_text
from reshard.doctor.match import first_failure
from reshard.doctor.scripts import diagnose_script
from reshard.doctor.spelling import Usage, spelled
from reshard.errors import Problem
from reshard.shown import escape, escape_lines
from reshard.train.launching.places import Place
from reshard.train.launching.provenance import words_of
from reshard.train.rewards import named
from reshard.train.run import Run
from reshard.train.show.monitor import last_checkpoint
from reshard.train.worker import PROBLEMS

FRAMES = 6
"""Frames of a traceback that are shown, from its end."""
LAST_LINES = 8
"""Lines of the log that are shown where no rank has left a traceback."""
CLAIM = ".failed"
"""Under a foreign launcher, the file by which the first rank that fails keeps the others from telling the same."""
GRACE = 2.0
"""Seconds that a rank which lost another one waits for that one to tell why."""
LABELS = {"en": ("error", "why", "cure"), "zh": ("错误", "原因", "解法")}


@dataclass(frozen=True)
class Failure:
    """What is told of a failure: who failed first, with which lines, and what the doctor says, the cause first."""

    who: str
    shown: tuple[str, ...]
    findings: tuple[Finding, ...]

    def as_dict(self, language: str = "en") -> dict[str, Any]:
        """For `metrics.jsonl`: of the findings the first."""
        told = [_row(each, language) for each in self.findings[:1]]
        return {"who": f"{self.who} failed first", "shown": list(self.shown), "problems": told}


def _row(finding: Finding, language: str) -> dict[str, Any]:
    told = finding.told(language)
    return {
        "code": finding.code,
        "certainty": finding.certainty,
        "title": told["title"],
        "cause": told["cause"] if finding.code != UNKNOWN else "",  # else it is the traceback
        "cure": told["cure"],
        "places": [f"{place}  {place.text}" for place in finding.places if place.target.endswith(".py")],
    }


def refusal(problems: Sequence[Problem]) -> dict[str, Any]:
    """The same of what ranks refuse to go on with."""
    told = []
    for problem in problems:
        about = [str(value) for value in (problem.rule, problem.tensor, problem.file) if value]
        about += [f"expected {problem.expected}"] if problem.expected else []
        about += [f"found {problem.found}"] if problem.found else []
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
    """The same of a signal."""
    return {"who": how, "shown": [], "problems": []}


def read_failure(log: Path, run: Run) -> Failure:
    """The failure that the log of all ranks of a run shows."""
    with log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - LARGEST, 0))
        content = file.read().decode("utf-8", "replace")
    return failure_in(str(log), content, run)


def failure_in(name: str, content: str, run: Run) -> Failure:
    """The failure that a text shows; `name` is what the text is called."""
    log = read_log(name, content)
    root = first_failure(log)
    findings = tuple(_explained(diagnose_text(name, content, Usage({"reshard"})), run))
    if root is None or is_consequence(root):
        silent = _silent(content, log)
        if silent:
            return Failure(f"rank {silent[0]}", tuple(_last_words(log, *silent)), findings)
    if root is None:
        return Failure("a rank", tuple(_last(log.lines)), findings)
    return Failure(_who(root), tuple(_short(root.root)), findings)


_EXIT = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-?\d+) ")
"""How torchrun's summary names a rank that failed (torch.distributed.elastic.multiprocessing.errors)."""


def _silent(content: str, log: Log) -> tuple[str, int] | None:
    """The rank that ended without a traceback, and its exit code: by a signal first. SIGTERM is torchrun's own."""
    own = (-signal.SIGTERM, 128 + signal.SIGTERM)
    ended = {rank: int(code) for rank, code in _EXIT.findall(content) if int(code) not in own}
    spoke = {each.stream.split("/")[-1] for each in log.tracebacks}
    silent = [(rank, code) for rank, code in ended.items() if code < 0 or rank not in spoke]
    return min(silent, key=lambda each: each[1]) if silent else None


def _last_words(log: Log, rank: str, code: int) -> Iterator[str]:
    """How a rank ended that left no traceback, and what it printed last."""
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
"""Bars of progress, and warnings."""


def signal_name(number: int) -> str:
    """SIGKILL for 9, with what it usually means."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    hint = ", which the kernel sends when memory runs out" if number == signal.SIGKILL else ""
    return f"{name}{hint}"


def _explained(findings: list[Finding], run: Run) -> list[Finding]:
    """What the log shows, together with what this machine and the reward's script break of it, and nothing else."""
    shown = {finding.code for finding in findings}
    scripts = [named(each).file for each in run.reward]
    of_script = [found for script in scripts if script.is_file() for found in diagnose_script(str(script))]
    both = spelled(combined([*findings, *diagnose_environment(), *of_script]), Usage({"reshard"}))
    return [finding for finding in both if finding.code in shown or shown & set(finding.also)]


_LAUNCHER = re.compile(
    r"^<frozen|distributed/(?:elastic/|run\.py|c10d_logger\.py)|reshard/train/(?:worker|launch)\.py| <module>$"
)
"""Frames that are on the way to every failure."""


def _who(root: Traceback) -> str:
    rank = root.stream.split("/")[-1]
    return f"rank {rank}" if rank.isdecimal() else "a rank"


def _short(root: Traceback) -> Iterator[str]:
    """The last frames, without where packages are installed, and the exception."""
    for frame in [frame for frame in root.frames if not _LAUNCHER.search(frame)][-FRAMES:]:
        yield "  " + re.sub(r"^.*/(?:site|dist)-packages/", "", frame)
    yield f"{root.exception}: {root.message}" if root.message else root.exception


def print_failure(run: Run, log: Path, console: Console, language: str = "en") -> Failure:
    """Tell why the ranks of a run have failed, from their log; the cause and its cure stand last."""
    failure = read_failure(log, run)
    _print(run, failure, console, language, f"all that the ranks printed: {log}")
    return failure


def print_exception(
    run: Run, place: Place, error: Exception, console: Console, language: str = "en"
) -> Failure | None:
    """Tell why this rank has failed, under a foreign launcher: one line if it only lost another one.

    The failure, if this rank is the first to tell.
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
    """Whether another rank, of whose end this one died, has claimed to tell it."""
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
    _print_full(run, console)
    print_way_on(run, console, place)
    for finding in failure.findings[:1]:
        title = escape(finding.message.of(language))
        console.print(f"[bold red]{error}:[/] [bold]{title}[/] ({finding.code}, {finding.certainty})")
        for shown in (shown for shown in finding.places if shown.target.endswith(".py")):
            console.print(f"  {escape(str(shown))}  {escape(shown.text)}")
        if finding.code != UNKNOWN:  # its cause is the traceback above
            console.print(f"[bold]{why}[/] {escape_lines(finding.rule.of(language))}")
        console.print(f"[bold]{cure}[/] {escape_lines(finding.remedy.of(language))}")


FULL = 1 << 20
"""Bytes on a disk that are too few for any checkpoint."""


def _print_full(run: Run, console: Console) -> None:
    """A full disk keeps ranks from telling why they fail."""
    if shutil.disk_usage(run.output).free < FULL:
        console.print(f"[bold]the disk is full:[/] {escape(str(run.output))}; free space before you continue")


def print_killed(run: Run, log: Path, number: int, console: Console) -> dict[str, Any]:
    """Say that torchrun was ended from outside, and all ranks with it: none of them has failed."""
    who = f"torchrun was killed by {signal_name(number)}"
    console.print(f"\n[bold red]{escape(who)}[/]: all ranks have ended")
    console.print(f"all that the ranks printed: {escape(str(log))}")
    print_way_on(run, console, None)
    return {"who": who, "shown": ["all ranks have ended"], "problems": []}


def print_interruption(run: Run, console: Console, how: str, place: Place | None = None) -> None:
    """Say how a signal has ended a run, and what is left of it."""
    console.print(f"\n[bold yellow]{escape(how)}[/]")
    print_way_on(run, console, place)


def print_way_on(run: Run, console: Console, place: Place | None) -> None:
    """Which checkpoint is whole, and the command that continues from it, by the launcher that has given the place."""
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
