"""The first failure of a log: that of the rank that died first, after which its process did not go on."""

from __future__ import annotations

import re

from reshard.base.languages import Text
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.text.log import Log, LogLine, Traceback
from reshard.runs.doctor.text.partial_failures import (
    CUT_OFF_TRACEBACK,
    EXIT_STATUS,
    is_consequence,
    is_launchers,
    loose_failure,
)


def living(log: Log) -> list[Traceback]:
    """The tracebacks after which their process did not continue.

    If a launcher reports at the end that a process failed, and nothing else says why, all of them count.
    """
    alive = [
        each
        for each in log.tracebacks
        if each.last > (log.measured if _ends_script(each) else log.progress).get(each.stream, 0)
        and not _is_handled(each, log)
    ]
    if alive or not log.tracebacks:
        return alive
    sign = loose_failure(_unhandled_lines(log))
    return log.tracebacks if sign is not None and sign.exception in (EXIT_STATUS, CUT_OFF_TRACEBACK) else []


def _ends_script(failure: Traceback) -> bool:
    """Whether a script died of it: a later "done" comes from the shell script around it."""
    return failure.before is None and bool(failure.frames) and failure.frames[0].endswith(" <module>")


_LOGS = re.compile(r"\b(?:WARN(?:ING)?|ERROR|CRITICAL)\b")
"""The level of a line in which a program logs an exception that it has caught."""
_IGNORED = "Exception ignored in"
"""What Python prints before the traceback of a destructor, which ends nothing."""
_CAUGHT = re.compile(r"\b(?i:caught|retry(?:ing)?|skipp(?:ed|ing)|ignor(?:ed|ing))\b")
_WENT_ON = re.compile(
    r"\b(?i:done|finished|completed?|wrote|saved|accuracy|bye)\b|\b(?i:step|epoch|iter\w*)\W{0,3}\d"
)


def _is_handled(failure: Traceback, log: Log) -> bool:
    """Whether a program has logged an exception and gone on, by the lines before and after it."""
    before = [line for line in _own(failure.stream, log) if line.number < failure.first][-1:]
    if any(_IGNORED in line.text for line in before):
        return True
    if _ends_script(failure) or not failure.frames or not _went_on(failure.stream, failure.last, log):
        return False
    return any(_LOGS.search(line.text) for line in before)


def _own(stream: str, log: Log) -> list[LogLine]:
    return [line for line in log.lines if line.stream == stream and line.text.strip()]


def _went_on(stream: str, number: int, log: Log) -> bool:
    """Whether a process worked on after a line, and did not fail later."""
    after = [line for line in _own(stream, log) if line.number > number]
    return any(_WENT_ON.search(line.text) for line in after) and loose_failure(after) is None


def _unhandled_lines(log: Log) -> list[LogLine]:
    """The lines without exceptions that the program has caught, and the lines in which it says so."""
    handled = [each for each in log.tracebacks if _is_handled(each, log)]
    caught = {line.stream: line.number for line in log.lines if _is_caught(line)}
    went_on = {stream for stream, last in caught.items() if _went_on(stream, last, log)}
    return [
        line
        for line in log.lines
        if not any(
            each.stream == line.stream and each.first - 1 <= line.number <= each.last for each in handled
        )
        and not (line.stream in went_on and _is_caught(line))
    ]


def _is_caught(line: LogLine) -> bool:
    return bool(_LOGS.search(line.text) and _CAUGHT.search(line.text))


def live_lines(log: Log) -> list[LogLine]:
    """Lines by stream that are after the last sign that their process continued, or in a failure."""
    alive = living(log)
    return [
        line
        for line in log.ordered
        if line.number > log.progress.get(line.stream, 0) or any(is_in(line, each) for each in alive)
    ]


def first_failure(log: Log) -> Traceback | None:
    """The traceback of the rank that died first, not of ranks that lost a peer."""
    alive = living(log)
    own = [each for each in alive if not is_consequence(each)] or alive
    named = log.first_to_die
    by_rank = [each for each in own if named and each.rank == named[0]]
    return next(iter(by_rank or own), None)


def first_sign(log: Log) -> Traceback | None:
    """The first failure, with or without a complete traceback: see `loose_failure`.

    Its exception is EXIT or CUT_OFF if the log has only an exit status or part of a traceback. A launcher's failure
    counts only if there is no other.
    """
    whole = first_failure(log)
    if whole is not None and not is_consequence(whole):
        return whole
    loose = loose_failure(_unhandled_lines(log))
    if whole is None or (loose is not None and loose.exception not in (EXIT_STATUS, CUT_OFF_TRACEBACK)):
        return loose
    return loose if loose is not None and is_launchers(whole) else whole


def which_is_first(root: Traceback) -> Text:
    """A text that says which failure of the log is the first."""
    phrase = (
        "first-failure"
        + "-alone" * (root.exception in ("", EXIT_STATUS, CUT_OFF_TRACEBACK))
        + "-of" * bool(root.stream)
    )
    who = f"rank {root.stream}" if root.stream.isdecimal() else root.stream
    return phrase_text(phrase, exception=root.exception, who=who, line=root.last)


def is_in(line: LogLine, failure: Traceback) -> bool:
    """Whether a line belongs to a failure, or to its message."""
    return failure.stream == line.stream and failure.root.first <= line.number <= failure.end
