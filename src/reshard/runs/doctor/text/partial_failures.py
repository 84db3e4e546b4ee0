"""The failure in lines without a complete traceback: an error in one line, a cut-off traceback, an exit status.

Such a failure counts only if the run did not continue after it (`progress_lines.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from reshard.runs.doctor.text.error_lines import (
    QUIET_LINE,
    ErrorMessage,
    assertion_in,
    embedded_in,
    exception_in,
    is_of_launcher,
    logged_in,
    quoted_in,
)
from reshard.runs.doctor.text.exit_status import reports_exit
from reshard.runs.doctor.text.free_text import last_words, reports_failure
from reshard.runs.doctor.text.line_prefixes import TRACEBACK_START
from reshard.runs.doctor.text.progress_lines import after_progress
from reshard.runs.doctor.text.python_messages import message_in
from reshard.runs.doctor.text.tracebacks import (
    LogLine,
    Traceback,
    asserted,
    end_of_message,
    frame_of,
    source_of,
)

EXIT_STATUS = "exit"
"""The exception of a failure of which only an exit status is known."""
CUT_OFF_TRACEBACK = "cut off"
"""The exception of a traceback whose end is missing from the log."""
MAX_QUOTED_LINES = 30
"""Number of lines up to which a text is considered a quotation from a log."""
MAX_TITLE = 300
"""Maximum letters of a line that may be a title."""

_STARTS_WORKERS = r"\S{0,300}(?:python|torchrun|accelerate|deepspeed|/bash|/sh\b)"
_WORKER = rf"CalledProcessError(?!: Command ['\"]?\[?['\"](?!{_STARTS_WORKERS}))"
"""For a command that starts workers, not for a compiler or another tool."""
_STEP = r"^\w+: [^\n]{0,60}exited with non-zero status \d"
_OF_LAUNCHER = re.compile(f"ChildFailedError|{_WORKER}|{_STEP}")
_CONSEQUENCE = re.compile(
    rf"ChildFailedError|ProcessRaisedException|ProcessExitedException|SignalException|{_WORKER}|KeyboardInterrupt"
    r"|Connection (?:reset|closed) by peer|Broken pipe|NCCL.{0,500}(?:aborted|remote process exited)|ActorDiedError"
    r"|RayTaskError|Socket Timeout|DistNetworkError|Engine core (?:proc \S{1,40} )?initialization failed"
    r"|EngineDeadError|Engine process failed to start|EngineCore encountered an issue"
)


def is_consequence(failure: Traceback) -> bool:
    """Whether a process died because another one did."""
    return bool(_CONSEQUENCE.search(failure.error_text))


def is_launchers(failure: Traceback) -> bool:
    """Whether it only says that another process failed."""
    return failure.exception == EXIT_STATUS or bool(_OF_LAUNCHER.search(failure.error_text))


def loose_failure(lines: Sequence[LogLine]) -> Traceback | None:
    """The failure in lines without a complete traceback; None if there is none.

    Exceptions come before failed device assertions, these before logged errors, exceptions in sentences, cut-off
    tracebacks, and exit statuses; among equals the first counts. Messages of processes that lost another one do not
    count.
    """
    after = after_progress(lines)
    searches = (_in_one_line, _cut_off, _exit_status, _joined, _unnamed, last_words)
    return next((failure for search in searches if (failure := search(after))), None)


def _in_one_line(lines: Sequence[LogLine]) -> Traceback | None:
    """The error that one line reports. What a launcher logs after its workers' end does not count."""
    ended = next((at for at, line in enumerate(lines) if "ChildFailedError" in line.text), len(lines))
    for search in (exception_in, embedded_in, assertion_in, logged_in, quoted_in):
        for at, line in enumerate(lines[:ended] if search is logged_in else lines):
            if not _CONSEQUENCE.search(line.text) and (failure := search(line.text)):
                return _failure(lines, at, failure)
    return None


def _failure(lines: Sequence[LogLine], at: int, error: ErrorMessage) -> Traceback:
    """A failure in one line, with the frames before it in its stream and the rest of the message."""
    name, message = error
    before = [line for line in lines[:at] if line.stream == lines[at].stream]
    rest = [line for line in lines[at:] if line.stream == lines[at].stream]
    first = _first_of_traceback(before)
    frames = [frame for line in before[first:] if (frame := frame_of(line.text))]
    end = end_of_message(rest, 0) if name else 1
    message = "\n".join([message, *(line.text for line in rest[1:end])])
    if name == "AssertionError" and not message.strip():
        message = asserted(before[-3:])
    start = before[first].number if frames else lines[at].number
    last = rest[end - 1].number
    failure = Traceback(lines[at].stream, start, lines[at].number, last, name, message, frames)
    failure.source = source_of(before[first:])
    return failure


_NUMBERED = re.compile(r"-{1,}> ?\d+ |\d+ |\[?(?:File )?/?[\w./<>-]+\]?(?:\.py|>|:\d+)\S{0,40},? in ")
"""Lines of code in a notebook's traceback, and its frames."""


def _first_of_traceback(before: Sequence[LogLine]) -> int:
    """Where the frames and the code begin that are directly before the end of these lines."""
    first = len(before)
    while first and (
        before[first - 1].text[:1] in (" ", "", "^")
        or _NUMBERED.match(before[first - 1].text)
        or any(frame_of(line.text) for line in before[max(0, first - 2) : first])  # or its code, not indented
    ):
        first -= 1
    return first


def _cut_off(lines: Sequence[LogLine]) -> Traceback | None:
    """A traceback cut off by the end of the log. A launcher's does not count: it only reports a worker's death."""
    printed = [line for line in lines if line.text.strip()]
    if not printed or any(is_of_launcher(line.text) for line in printed):
        return None
    same = [line for line in printed if line.stream == printed[-1].stream]
    framed = [(at, frame) for at, line in enumerate(same) if (frame := frame_of(line.text))]
    if not framed:
        return None
    (at, innermost), frames = framed[-1], [frame for _, frame in framed]
    first, last, stream = same[0].number, same[-1].number, same[0].stream
    below = same[at + 1 :]
    rest = [line for line in below if not _is_source(line.text)]
    if rest:  # the message, without the name of its exception
        end = rest[end_of_message(rest, 0) - 1].number
        message = "\n".join(line.text.strip() for line in rest if line.number <= end)
        return Traceback(stream, first, rest[0].number, end, "", message, frames)
    if assertion := asserted(below):
        return Traceback(stream, first, last, last, "AssertionError", assertion, frames)
    if len(below) > 2:
        return None
    return _titled(printed[0], frames) or Traceback(
        stream, first, last, last, CUT_OFF_TRACEBACK, innermost, frames
    )


def _titled(line: LogLine, frames: Sequence[str]) -> Traceback | None:
    """The failure that the first line of a text states, above a traceback that was pasted without its end."""
    if frame_of(line.text) or QUIET_LINE.search(line.text) or len(line.text) > MAX_TITLE:
        return None
    error = message_in(line.text) or (("", line.text.strip()) if reports_failure(line.text) else None)
    return _at(line, *error, frames) if error else None


def _is_source(text: str) -> bool:
    """Whether a line below a frame shows its code, marks a part of it, or stands for what was left out."""
    return text[:1] in (" ", "\t", "│", "|") or not text.strip(" ^~.…")


def _exit_status(lines: Sequence[LogLine]) -> Traceback | None:
    line = next((line for line in lines if reports_exit(line.text)), None)
    return line and _at(line, EXIT_STATUS, line.text.strip())


def _joined(lines: Sequence[LogLine]) -> Traceback | None:
    """A traceback that cannot be parsed: its lines were joined, or it was cut in the middle of one."""
    starts = (line for line in lines if TRACEBACK_START in line.text)
    line = next((line for line in starts if not line.text.lstrip().startswith("#")), None)
    if line is None:
        return None
    message = line.text[line.text.index(TRACEBACK_START) :].strip()
    return _at(line, CUT_OFF_TRACEBACK, message, [message])


def _unnamed(lines: Sequence[LogLine]) -> Traceback | None:
    """A message of Python without the name of its exception, as people write it in a title."""
    for line in lines if len(lines) <= MAX_QUOTED_LINES else ():
        error = None if QUIET_LINE.search(line.text) else message_in(line.text)
        if error:
            return _at(line, *error)
    return None


def _at(line: LogLine, exception: str, message: str, frames: Sequence[str] = ()) -> Traceback:
    """A failure in one line."""
    return Traceback(line.stream, line.number, line.number, line.number, exception, message, list(frames))
