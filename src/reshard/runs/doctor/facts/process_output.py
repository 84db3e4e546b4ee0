"""What the processes of a run printed last, and how they failed: the first failure with its frames, and each rank's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile

from reshard.base.foreign_text import clipped
from reshard.runs.checks.finding import Finding
from reshard.runs.doctor.facts.run_settings import Fact, at
from reshard.runs.doctor.text.first_failure import first_sign, living
from reshard.runs.doctor.text.log import Log, Traceback
from reshard.runs.doctor.text.partial_failures import (
    CUT_OFF_TRACEBACK,
    EXIT_STATUS,
    is_consequence,
    is_launchers,
)
from reshard.runs.doctor.text.run_details import ABSENT_RANKS, FIRST_FAILURE_TITLE, STATED_WORLD_SIZE
from reshard.runs.doctor.text.tracebacks import frame_of

SHOWN, MESSAGE = 300, 2000
"""Characters of a line, and of a message."""


def root_of(findings: Sequence[Finding], logs: Sequence[Log]) -> tuple[Log, Traceback] | None:
    """The first failure: of several logs', the one that the first finding is about, unless it only follows from one."""
    about = {place.target: at for at, each in reversed([*enumerate(findings)]) for place in each.places}
    signs = [(log, sign) for log in logs if log.name in about and (sign := first_sign(log))]
    return min(signs, key=lambda each: (_follows(each[1]), about[each[0].name]), default=None)


def _follows(failure: Traceback) -> bool:
    """Whether a process failed because another one did."""
    return is_launchers(failure) or is_consequence(failure)


def failure_of(log: Log, failure: Traceback) -> Fact:
    """The first exception of a chain, and those that followed."""
    first = failure.root
    then: list[Fact] = []
    while failure.before:
        then.insert(0, _raised(log, failure, MESSAGE))
        failure = failure.before
    last = min(first.end, first.last + _message(first).count("\n"))
    lines = {"first": first.first, "last": last, "follows": _follows(first)}
    return {**_raised(log, first, MESSAGE), **lines, "then": then}


def _raised(log: Log, failure: Traceback, length: int) -> Fact:
    """The exception of a failure: null for an exit status, and for a traceback without its end."""
    has_name = failure.exception not in (CUT_OFF_TRACEBACK, EXIT_STATUS, "")
    return {
        "process": failure.stream,
        "exception": failure.exception if has_name else None,
        "message": None if failure.exception == CUT_OFF_TRACEBACK else clipped(_message(failure), length),
        **at(log.name, failure.last),
    }


def _message(failure: Traceback) -> str:
    """The first line of a message, and the indented ones below: others may be what was printed next."""
    first, *more = failure.message.split("\n")
    return "\n".join([first, *takewhile(lambda line: line[:1].isspace(), more)])


_FRAME = re.compile(
    r"(?P<source>.{1,300}?):(?P<line>\d+)(?: (?P<function>.+))?|(?P<file>\S{1,300})(?: (?P<name>.+))?"
)


def frames_of(log: Log, failure: Traceback) -> Iterator[Fact]:
    """The frames of the first exception in a chain, with the line of code that the log shows below each."""
    first = failure.root
    lines = [line for line in log.streams.get(first.stream, []) if line.number >= first.first]
    pairs = iter(zip(lines, [*lines[1:], None], strict=True))
    for frame in first.frames if first.exception != EXIT_STATUS else ():  # the launcher's
        pair = next((pair for pair in pairs if frame_of(pair[0].text) == frame), None)
        if pair is None or not (match := _FRAME.fullmatch(frame)):
            return
        line, below = pair
        yield {
            "source": match["source"] or match["file"],
            "source_line": int(match["line"]) if match["line"] else None,
            "function": match["function"] or match["name"],
            "code": _code_below(line.text, below.text if below else ""),
            **at(log.name, line.number),
        }


def _code_below(frame: str, below: str) -> str | None:
    """The line of code in the line below a frame of Python's own format."""
    is_code = 'File "' in frame and below.startswith("    ") and not frame_of(below)
    return clipped(below.strip(), SHOWN) if is_code else None


def ranks_of(logs: Sequence[Log]) -> tuple[dict[str, list[Fact]], Fact]:
    """The last lines and the failures of processes, and what is known of all ranks."""
    failed = [_raised(log, each, SHOWN) for log in logs for each in living(log) if not is_launchers(each)]
    known: Fact = {
        "first_failed": list(_first_failed(logs)),
        "world": [*_stated(logs, STATED_WORLD_SIZE)],
        "absent": [*_stated(logs, ABSENT_RANKS)],
    }
    return {"last": list(_last_lines(logs)), "failed": failed}, known


def _last_lines(logs: Sequence[Log]) -> Iterator[Fact]:
    """The last line with words of each process: of each prefix in each log."""
    for log in logs:
        for process, lines in log.streams.items():
            line = next((line for line in reversed(lines) if re.search(r"\w", line.text)), None)
            if line:
                text = clipped(line.text.strip(), SHOWN)
                yield {"process": process, "text": text, **at(log.name, line.number)}


def _first_failed(logs: Sequence[Log]) -> Iterator[Fact]:
    """The rank that torchrun saw fail first."""
    for log in logs:
        if log.first_to_die:
            rank, line = log.first_to_die
            yield {"rank": rank, "known_by": f"torchrun: {FIRST_FAILURE_TITLE}", **at(log.name, line.number)}


def _stated(logs: Sequence[Log], pattern: re.Pattern[str]) -> Iterator[Fact]:
    """The numbers in the first line of each log that says something about the ranks."""
    for log in logs:
        matches = ((line.number, match) for line in log.lines if (match := pattern.search(line.text)))
        for number, match in islice(matches, 1):
            numbers = {
                name: [int(each) for each in text.split(", ")]
                for name, text in match.groupdict("").items()
                if text
            }
            yield {
                **{name: each if name == "ranks" else each[0] for name, each in numbers.items()},
                **at(log.name, number),
            }
