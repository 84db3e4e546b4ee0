"""Python tracebacks in the lines of one process: as printed by the interpreter, by rich in a box, or by a notebook."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from reshard.runs.doctor.text.line_prefixes import TRACEBACK_START


class LogLine(NamedTuple):
    """A line of a log: `number` counts from 1, `stream` is the name in its prefix ("" without one)."""

    number: int
    stream: str
    text: str

    @property
    def rank(self) -> int | None:
        """The rank that printed it; None if its prefix names none."""
        return rank_of(self.stream)


def rank_of(stream: str) -> int | None:
    """The rank in the name of a stream: 3 for `3` and for `node7/3`; None for other names."""
    name = stream.rpartition("/")[2]
    return int(name) if name.isdecimal() else None


@dataclass
class Traceback:
    """A Python traceback in one stream. `before` is the earlier one in its chain.

    It has the lines `first` to `end`: the exception is in line `last`, and its message continues to `end`. `frames`
    are `file:line function`, the outermost first.
    """

    stream: str
    first: int
    last: int
    end: int
    exception: str
    message: str
    frames: list[str] = field(default_factory=list)
    before: Traceback | None = None
    source: str = ""
    """The line of code of the innermost frame, if the log shows it."""

    @property
    def error_text(self) -> str:
        """The exception and its message, as the interpreter prints them."""
        return f"{self.exception}: {self.message}" if self.exception else self.message

    @property
    def rank(self) -> int | None:
        """The rank that printed it; None if its prefix names none."""
        return rank_of(self.stream)

    @property
    def root(self) -> Traceback:
        """The first of a chain."""
        return self.before.root if self.before else self


_STARTS = re.compile(
    r"(?<!Exception Group )" + re.escape(TRACEBACK_START) + r":?(?: [─-]+\S?| \(RANK \d+\))?$"
)
"""The interpreter's ends in a colon, rich's in the corner of its box, a notebook's in neither; torch's DCP adds a rank.

An ExceptionGroup's does not count: the exceptions inside have their own.
"""
_FRAMES = (
    re.compile(r'[\s>`]*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)'),  # `> ` is loguru's
    re.compile(
        r'\s*"?(?P<file>[^\s"]+\.py)", line (?P<line>\d+), in (?P<name>.+)'
    ),  # pasted from the middle on
    re.compile(r"\s*[│|] (?P<file>\S+):(?P<line>\d+) in (?P<name>\S+)"),  # rich
    re.compile(
        r"\s*(?:File )?(?P<file>\S+?):(?P<line>\d+)(?:, | )in (?P<name>[^\s(]+)"
    ),  # IPython 8 and later
    re.compile(r"\s*(?P<file>\S+\.py|<ipython-input-\S+>)(?P<line>) in (?P<name>[^(]+)"),  # IPython 7, Colab
    re.compile(r"File (?P<file>\S+\.py):(?P<line>\d+)(?P<name>)$"),  # IPython 8, outside of functions
    re.compile(r"\s*(?P<file>Cell In ?\[\d+\]), line (?P<line>\d+)(?P<name>)"),
)
_RAISED = re.compile(r"\s*((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:: (.*)|:?$)")
_LINKS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_LOGGED = re.compile(
    r"\[?(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|[EWI]\d{4})\b|\[\d{4}-|={20,}|-{20,}|\s*\d+%\||\s*```|\s*\+-|\"[,}\]]|[\w.-]+(?:\[\w+\])?==?v?\d+\.\d"
)
_CAUGHT = re.compile(r"Caught \w+ in (?:DataLoader worker|replica|pin memory)")
"""What torch raises in place of an exception of a worker, whose own traceback follows."""
MESSAGE_LINES = 12
"""Lines of an exception's message that are kept: some print a complete table."""


def tracebacks(lines: list[LogLine]) -> Iterator[Traceback]:
    """The tracebacks of one stream; chained ones are inside these."""
    before: Traceback | None = None
    at = 0
    while at < len(lines):
        if not _STARTS.search(lines[at].text):
            at += 1
            continue
        traceback, at = _traceback(lines, at)
        if traceback is None:
            continue
        if _CAUGHT.match(traceback.message) and _STARTS.search(lines[min(at, len(lines) - 1)].text):
            original, end = _traceback(lines, at)
            traceback, at = (original, end) if original else (traceback, at)
        traceback.before = before
        if traceback.exception.endswith("CheckpointException"):
            at = _taken_in(traceback, lines, at)
        linked = next(
            (i for i in range(at, min(at + 3, len(lines))) if lines[i].text.strip() in _LINKS), None
        )
        if linked is None:
            yield traceback
            before = None
        else:
            before, at = traceback, linked + 1


def _traceback(lines: list[LogLine], start: int) -> tuple[Traceback | None, int]:
    """The traceback that begins at a line, if its exception is there, and where it ends."""
    indent = _indent(lines[start].text)
    frames: list[str] = []
    for at in range(start + 1, len(lines)):
        text = lines[at].text
        if frame := frame_of(text):
            frames.append(frame)
        elif _STARTS.search(text):
            return None, at
        elif text.strip() and _indent(text) <= indent and (raised := _RAISED.match(text)):
            end = end_of_message(lines, at)
            message = "\n".join([raised[2] or "", *(line.text for line in lines[at + 1 : end])]).strip()
            if not message and raised[1] == "AssertionError":
                message = asserted(lines[start + 1 : at])
            first, last, ended = lines[start].number, lines[at].number, lines[end - 1].number
            traceback = Traceback(lines[start].stream, first, last, ended, raised[1], message, frames)
            traceback.source = source_of(lines[start + 1 : at])
            return traceback, end
    return None, len(lines)


def source_of(lines: list[LogLine]) -> str:
    """The code below the last frame, or the line of it that a notebook or rich marks; "" if there is none."""
    last = max((at for at, line in enumerate(lines) if frame_of(line.text)), default=None)
    below = [line.text for line in (lines[-10:] if last is None else lines[last + 1 : last + 30])]
    mark = next(filter(None, map(_MARKED.match, below)), None)
    if mark and (marked := mark.string[mark.end() :]):
        return marked.strip()
    if last is None:
        return next((code.strip() for code, marks in pairwise(below) if _CARETS.fullmatch(marks)), "")
    code = [_MARGIN.sub("", text) for text in below[:2]]
    return next((text.strip() for text in code if text.strip(" ^~│╰─╯")), "")


_MARGIN = re.compile(r"^[\s│|]*(?:[-❱>]+\s*)?(?:\d+\s)?\s*")
"""What a notebook and rich print before a line of code."""
_CARETS = re.compile(r"^\s{0,300}[~^]{2}[~^ ]*$")
"""What Python 3.11 and later print below the part of a line of code that failed."""
_MARKED = re.compile(r"\s{0,40}[│|]?\s{0,40}(?:-{1,40}>|❱)\s{0,8}\d{1,8}\s[\s│|]*")
"""The marker before the line that a notebook or rich shows as the one that failed."""


def _taken_in(traceback: Traceback, lines: list[LogLine], at: int) -> int:
    """Merge the tracebacks of ranks into the exception of torch's DCP that lists them. Returns where they end."""
    inside: list[Traceback] = []
    while at < len(lines) and "(RANK " in lines[at].text and _STARTS.search(lines[at].text):
        one, at = _traceback(lines, at)
        inside += [one] if one else []
    if inside:
        traceback.before, traceback.message = inside[0], inside[0].error_text
        traceback.last, traceback.end = inside[0].last, inside[-1].end
    return at


def asserted(lines: list[LogLine]) -> str:
    """The source of the assertion at the end of a traceback, which replaces a missing message."""
    sources = [line.text.strip() for line in lines]
    return next((text for text in reversed(sources) if text.startswith("assert")), "")


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def frame_of(text: str) -> str | None:
    """A frame as `file:line function`, as far as a line has them; None if it has none."""
    match = next((match for pattern in _FRAMES if (match := pattern.match(text))), None)
    if match is None:
        return None
    place = f"{match['file']}:{match['line']}" if match["line"] else match["file"]
    return f"{place} {match['name']}".rstrip()


def end_of_message(lines: list[LogLine], at: int) -> int:
    """Where the message of the exception in a line ends: the first line that is not part of it."""
    end = at + 1
    while end < len(lines) and end - at < MESSAGE_LINES and _goes_on(lines[end].text):
        end += 1
    return end


def _goes_on(text: str) -> bool:
    """Whether a line after an exception still belongs to its message."""
    return (
        bool(text.strip())
        and not _STARTS.search(text)
        and text.strip() not in _LINKS
        and not _LOGGED.match(text)
    )
