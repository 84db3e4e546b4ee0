"""Why a command failed: the rank that failed first, its last lines, and the doctor's findings, from what it printed."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from reshard.base.errors import Problem
from reshard.base.foreign_text import escape, escape_lines
from reshard.runs.checks import rules
from reshard.runs.checks.finding import UNKNOWN_FAILURE, Finding
from reshard.runs.checks.machine_checks import check_machine
from reshard.runs.checks.phrases import aside
from reshard.runs.checks.root_causes import combined
from reshard.runs.checks.script import read_source
from reshard.runs.checks.script_checks import check_script
from reshard.runs.doctor.log_diagnosis import diagnose_text
from reshard.runs.doctor.remedy_spelling import RunTools, spelled
from reshard.runs.doctor.text.first_failure import first_failure
from reshard.runs.doctor.text.log import Log, LogLine, Traceback, read_log
from reshard.runs.doctor.text.partial_failures import EXIT_STATUS, is_consequence
from reshard.runs.guard.end.log_parts import read_parts
from reshard.runs.guard.supervise.output_relay import without_times
from reshard.runs.guard.supervise.signal_passing import signal_name
from reshard.runs.guard.watch.trainer_progress import TrainerProgress
from reshard.runs.guard.watch.watcher import Notice, OutputLine

MAX_FRAMES = 6
"""Frames of a traceback that are shown, counted from its end."""
MAX_LAST_LINES = 8
"""Lines of the log that are shown if no rank left a traceback."""
DISK_FULL_BYTES = 1 << 20
"""Free bytes below which no checkpoint fits on a disk."""
SOME_RANK = "a rank"
"""A rank of which the log does not tell the number."""
FAILURE_LABELS = {"en": ("error: ", "why", "fix"), "zh": ("错误：", "原因", "解法")}


@dataclass(frozen=True)
class RunEvidence:
    """What is known of a run besides its log.

    `tools` are those whose spelling remedies use, `scripts` are diagnosed too, `oom_kills` is their number since the
    start.
    """

    tools: frozenset[str] = frozenset()
    scripts: tuple[Path, ...] = ()
    output: Path | None = None
    ranks: int = 0
    """Number of ranks, 0 if unknown."""
    oom_kills: int = 0
    status: int = 0
    """Exit status of the command, as in a shell."""
    notices: tuple[Notice, ...] = ()


@dataclass(frozen=True)
class Failure:
    """A failure: the rank that failed first, lines to show, and the cause: the doctor's first finding in a log."""

    who: str
    shown: tuple[str, ...]
    findings: tuple[Finding, ...]
    did: str = "failed first"
    follows: bool = False
    """Whether it only shows that another rank has ended, which may be on another node."""

    @staticmethod
    def of_notice(notice: Notice) -> Failure:
        """A run that the guard ended."""
        finding = rules.of_problem(notice.problem, Path())
        return Failure("the guard", notice.lines, (finding,), "ended the run")

    def as_dict(self, language: str = "en") -> dict[str, Any]:
        """For JSON."""
        rows = [_row(each, language) for each in self.findings]
        return {"who": f"{self.who} {self.did}", "shown": list(self.shown), "problems": rows}


def _row(finding: Finding, language: str) -> dict[str, Any]:
    row = finding.in_language(language)
    return {
        "code": finding.code,
        "certainty": finding.certainty,
        "title": row["title"],
        "cause": row["cause"] if finding.code != UNKNOWN_FAILURE else "",  # if unknown, it is the traceback
        "cure": row["cure"],
        "places": [f"{place}  {place.text}" for place in finding.places if place.target.endswith(".py")],
    }


def read_failure(log: Path, seen: RunEvidence) -> Failure:
    """The failure in the log of all ranks."""
    content = ""
    with suppress(FileNotFoundError):  # the command may have cleaned the working folder
        content = without_times(read_parts(log))
    failure = failure_in(str(log), content, seen)
    full = next(
        (each for each in _folders(seen, log) if shutil.disk_usage(each).free < DISK_FULL_BYTES), None
    )
    return _of_full_disk(failure, full) if full else failure


def _folders(seen: RunEvidence, log: Path) -> Iterator[Path]:
    """Existing folders into which the run writes."""
    for folder in (seen.output, log.parent):
        if folder and folder.exists():
            yield folder


def _of_full_disk(failure: Failure, folder: Path) -> Failure:
    """A failure on a full disk: ranks and torchrun cannot record why they fail, and stumble over empty files."""
    message = f"OSError: {OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))}"
    diagnosed = diagnose_text("the disk", message, RunTools({"reshard"}))[:1]
    findings = tuple(replace(each, certainty="likely") for each in diagnosed)  # the disk was looked at
    lines = failure.shown if failure.who != SOME_RANK else ()
    return Failure(failure.who, (*lines, message), findings)


def failure_in(name: str, content: str, seen: RunEvidence = RunEvidence()) -> Failure:
    """The failure in a text called `name`."""
    log = read_log(name, content)
    root = first_failure(log)
    number = signal_in(seen.status) if root is None else 0
    if number:  # no launcher reports it
        log = read_log(name, f"{content}\n{SIGNAL_LINE.format(number, signal_name(number).split(':')[0])}")
    diagnosed = [each for each in _diagnosed(log, content, root, seen) if not _is_false_nan(each, log, root)]
    weighed = _weighed(_explained(diagnosed, seen), root, seen)
    silent = _silent_rank(content, log, seen) if root is None or is_consequence(root) else None
    if silent:
        rank, code = silent
        findings = _of_silent(rank, code, weighed, seen)
        return Failure(f"rank {rank}", tuple(_last_words(log, rank, code)), findings, follows=code is None)
    findings = weighed[:1]
    if root is None or root.exception == EXIT_STATUS:
        lines = [*_last(log.lines)[:-1], f"killed by {signal_name(number)}"] if number else _last(log.lines)
        return _of_rank("", None, lines, findings, seen, follows=root is None and not number)
    return _of_rank(
        _who(root, content), root, _short(root.root), findings, seen, follows=is_consequence(root)
    )


def _of_rank(
    who: str,
    root: Traceback | None,
    lines: Iterable[str],
    findings: tuple[Finding, ...],
    seen: RunEvidence,
    *,
    follows: bool,
) -> Failure:
    """The failure of a rank, if its number is known, or else of some rank; of the only process, or of the launcher."""
    if not who and seen.ranks == 1:
        return Failure("the command", tuple(lines), findings, "failed")
    if not who and root and root.frames and all(map(_OF_LAUNCHER.search, root.frames)):
        return Failure("the launcher", tuple(lines), findings, "failed")
    did = LOST_ANOTHER if any(each.code == PEER_CODE for each in findings) else Failure.did
    return Failure(who or SOME_RANK, tuple(lines), findings, did, follows)


SIGNAL_LINE = "Signal {} ({}) received by PID of the command"
"""torchrun's own words (torch.distributed.elastic.multiprocessing.errors), for what a shell's exit status tells."""
PEER_CODE, LOST_ANOTHER = "peer-died", "lost its connection to another rank"
AFTERMATH_CODES = (PEER_CODE, "hang", UNKNOWN_FAILURE)
"""Beginnings of codes of what the other ranks report, that wait for one that is gone."""
KILLED_CODES = "killed-"
"""Codes of findings in an exit status."""
NAN_CODE = "loss-nan"
OOM_LINE = "Memory cgroup out of memory: Killed process ({} by the counter oom_kill of the control group)"
"""The kernel's own words (mm/oom_kill.c), for what its counter shows."""


def _diagnosed(log: Log, content: str, root: Traceback | None, seen: RunEvidence) -> list[Finding]:
    """The doctor's findings. An exit status explains nothing if a rank raised an exception."""
    findings = diagnose_text(log.name, log.text if root is None else content, RunTools(set(seen.tools)))
    if not findings or not findings[0].code.startswith(KILLED_CODES):
        return findings
    if root and root.frames and not is_consequence(root):
        own = [line.text for line in log.lines if line.stream == root.stream and line.number <= root.end]
        return diagnose_text(log.name, own, RunTools(set(seen.tools)))
    if seen.oom_kills and findings[0].code == "killed-by-signal":
        return diagnose_text("the kernel", OOM_LINE.format(seen.oom_kills), RunTools(set(seen.tools)))
    return findings


def _of_silent(
    rank: str, code: int | None, findings: tuple[Finding, ...], seen: RunEvidence
) -> tuple[Finding, ...]:
    """Why a rank ended without a traceback. That other ranks lost it, or waited for it, is no reason."""
    own = tuple(each for each in findings if not each.code.startswith(AFTERMATH_CODES))
    if own or code is None or code >= 0:
        return own[:1] or (rules.of_problem(_ended_silently(rank, code), Path()),)
    message = SIGNAL_LINE.format(-code, signal_name(-code).split(":")[0])
    if seen.oom_kills:
        message = OOM_LINE.format(seen.oom_kills)
    return tuple(diagnose_text("the launcher", message, RunTools(set(seen.tools)))[:1])


def _ended_silently(rank: str, code: int | None) -> Problem:
    status = "" if code is None else f", with exit status {code}"
    return Problem(
        "rank-ended-silently",
        "a rank ended without a traceback",
        found=f"rank {rank}{status}",
        rule="sys.exit, os._exit, an abort in C++ or a launcher's limit ends a process like this",
        remedy=f"look for an exit in the script that only rank {rank} reaches, and run it again with "
        "PYTHONFAULTHANDLER=1, which shows where a crash in C++ happened",
        values={"rank": rank},
    )


def _is_false_nan(finding: Finding, log: Log, root: Traceback | None) -> bool:
    """Whether a finding blames NaN, and neither the exception nor the progress of the run says so."""
    if finding.code != NAN_CODE or (root and re.search(r"\bnan\b", root.error_text, re.IGNORECASE)):
        return False
    progress = TrainerProgress()
    lines = (OutputLine(0.0, line.text) for line in log.lines if "loss" in line.text.lower())
    return not any(notice.stop for line in lines for notice in progress.line(line))


def _weighed(findings: list[Finding], root: Traceback | None, seen: RunEvidence) -> tuple[Finding, ...]:
    """The findings, after what the guard saw if these only say that a rank was killed or waited for another one."""
    first = findings[0] if findings else None
    guessed = root is None or is_consequence(root) or root.exception in (EXIT_STATUS, "BrokenPipeError")
    guessed = guessed or bool(first and first.code.startswith((KILLED_CODES, "hang")))
    if not guessed or (first and first.code.startswith("short-")):
        return tuple(findings)
    noticed = sorted(_standing(seen.notices), key=lambda each: each.problem.severity != "error")
    return (*(rules.of_problem(each.problem, Path()) for each in noticed), *findings)


OVER, WAITING = "run-goes-on", ("run-stands-still", "rank-stopped")


def _standing(notices: Iterable[Notice]) -> list[Notice]:
    """What may explain a lost rank: neither a stall that was over, nor numbers."""
    standing: list[Notice] = []
    for notice in notices:
        if notice.problem.code == OVER:
            standing = [each for each in standing if each.problem.code not in WAITING]
        elif not notice.problem.code.endswith("-not-finite"):
            standing.append(notice)
    return standing


_EXIT = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-?\d+) ")
"""A failed rank in torchrun's summary (torch.distributed.elastic.multiprocessing.errors)."""


def _silent_rank(content: str, log: Log, seen: RunEvidence) -> tuple[str, int | None] | None:
    """The rank that ended without a traceback, and its exit code, if torchrun's summary has it; signals first.

    DeepSpeed's launcher has no summary: it is the only rank without a traceback, if all others lost a connection.
    """
    own = (-signal.SIGTERM, 128 + signal.SIGTERM)  # which torchrun itself sends
    spoke = {each.stream.split("/")[-1] for each in log.tracebacks}
    ended = [(rank, int(code)) for rank, code in _EXIT.findall(content) if int(code) not in own]
    silent = [(rank, code) for rank, code in ended if code < 0 or rank not in spoke]
    if silent:
        return min(silent, key=lambda each: each[1])
    world = _WORLD.search(content)
    count = seen.ranks or (int(world[1]) if world else 0)
    missing = {str(rank) for rank in range(count)} - spoke
    return (missing.pop(), None) if count > 1 and len(missing) == 1 else None


_WORLD = re.compile(r"\bdist_world_size=(\d+)")
"""What DeepSpeed's launcher prints (deepspeed.launcher.launch)."""


def _last_words(log: Log, rank: str, code: int | None) -> Iterator[str]:
    """How a rank without a traceback ended, and its last lines."""
    yield from _last([line for line in log.lines if line.stream.split("/")[-1] == rank])
    if code is None:
        yield "ended without a traceback"
    elif code < 0:
        yield f"killed by {signal_name(-code)}"
    else:
        yield f"ended with exit status {code}, without a traceback"


def _last(lines: list[LogLine]) -> list[str]:
    return [line.text for line in lines if line.text.strip() and not _NOISE.search(line.text)][
        -MAX_LAST_LINES:
    ]


_NOISE = re.compile(r"\d%\|.*\|.*\[|\w*Warning: |^\s*warnings\.warn\(")
"""Progress bars and warnings."""


def signal_in(status: int) -> int:
    """The signal that an exit status tells of, or 0: 137 in shells, 247 of DeepSpeed, which exits with -9."""
    number = min(status - 128, 256 - status)
    return number if number in set(signal.Signals) else 0


def _explained(findings: list[Finding], seen: RunEvidence) -> list[Finding]:
    """The findings in the log, combined with related ones about this machine and the scripts."""
    codes = {finding.code for finding in findings}
    scripts = [script for script in seen.scripts if script.is_file()]
    of_script = [each for script in scripts for each in check_script(read_source(str(script)))]
    both = spelled(combined([*findings, *check_machine(), *of_script]), RunTools(set(seen.tools)))
    return [finding for finding in both if finding.code in codes or codes & set(finding.also)]


_LAUNCHER = re.compile(
    r"^<frozen|distributed/(?:elastic/|run\.py|c10d_logger\.py)|reshard/train(?:ing)?/(?:worker|launch)\.py| <module>$"
)
"""Frames that occur in every traceback."""


_OF_LAUNCHER = re.compile(
    r"/torch/distributed/(?:run\.py|launcher/|elastic/)|/bin/|/accelerate/commands/|^<frozen"
)
"""Frames of a launcher's own traceback, in which there is no other."""


def _who(root: Traceback, content: str) -> str:
    """The rank of a traceback, "" if it is unknown. The number before torchrun's own lines is its process."""
    rank = root.stream.split("/")[-1]
    label = rank.isdecimal() and re.search(rf"^\[(?:default|rank){rank}\]:", content, re.MULTILINE)
    return f"rank {rank}" if label else ""


def _short(root: Traceback) -> Iterator[str]:
    """The last frames outside of launchers, or else the last one, without site-packages; then the exception."""
    of_script = [each for each in root.frames if not _LAUNCHER.search(each)]
    for frame in of_script[-MAX_FRAMES:] or root.frames[-1:]:
        yield "  " + re.sub(r"^.*/(?:site|dist)-packages/", "", frame)
    yield f"{root.exception}: {root.message}" if root.message else root.exception


def print_what(failure: Failure, console: Console) -> None:
    """Print which rank failed first, and its last lines."""
    console.print(f"\n[bold red]{escape(failure.who)} {failure.did}[/]")
    for line in "\n".join(failure.shown).splitlines():
        console.print(f"  {escape_lines(line)}")


def print_why(failure: Failure, console: Console, language: str = "en") -> None:
    """Print the cause and its fix."""
    error, why, cure = FAILURE_LABELS[language]
    for finding in failure.findings:
        title = escape(finding.message.of(language))
        console.print(f"[bold red]{error}[/][bold]{title}[/] {aside(finding).of(language)}")
        for place in (place for place in finding.places if place.target.endswith(".py")):
            console.print(f"  {escape(str(place))}  {escape(place.text)}")
        if finding.code != UNKNOWN_FAILURE:  # the cause of an unknown failure is the traceback above
            console.print(f"[bold]{why}[/] {escape_lines(finding.rule.of(language))}")
        console.print(f"[bold]{cure}[/] {escape_lines(finding.remedy.of(language))}")
