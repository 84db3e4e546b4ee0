"""Tracebacks of Python in the lines of one process: as the interpreter prints them, rich in a box, or a notebook."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from reshard.doctor.prefixes import START


class Line(NamedTuple):
    """One line of a log: `number` counts from 1, `stream` is what its prefix names ("" without one)."""

    number: int
    stream: str
    text: str


@dataclass
class Traceback:
    """A Python traceback as one stream printed it. `before` is the one that it says came before.

    Lines `first` to `end`: the exception stands in line `last`, and its message goes on to `end`.
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
    def said(self) -> str:
        """The exception and its message, as the interpreter prints them."""
        return f"{self.exception}: {self.message}" if self.exception else self.message

    @property
    def root(self) -> Traceback:
        """The first of a chain."""
        return self.before.root if self.before else self


_STARTS = re.compile(r"(?<!Exception Group )" + re.escape(START) + r":?(?: [─-]+\S?| \(RANK \d+\))?$")
"""The interpreter's ends in a colon, rich's in the corner of its box, a notebook's in neither; torch's DCP adds a rank.

That of an ExceptionGroup is none: the exceptions inside have their own.
"""
_FRAMES = (
    re.compile(r'[\s>]*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)'),  # `> ` is loguru's
    re.compile(
        r'\s*(?P<file>[^\s"]+\.py)", line (?P<line>\d+), in (?P<name>.+)'
    ),  # pasted from the middle on
    re.compile(r"\s*[│|] (?P<file>\S+):(?P<line>\d+) in (?P<name>\S+)"),  # rich
    re.compile(
        r"\s*(?:File )?(?P<file>\S+?):(?P<line>\d+)(?:, | )in (?P<name>[^\s(]+)"
    ),  # IPython 8 and later
    re.compile(r"\s*(?P<file>\S+\.py|<ipython-input-\S+>)(?P<line>) in (?P<name>[^(]+)"),  # IPython 7, Colab
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
MESSAGE_LINES = 12
"""Lines of an exception's message that are kept: some print a whole table."""


def tracebacks(lines: list[Line]) -> Iterator[Traceback]:
    """The tracebacks of one stream; those that others are chained to stand inside these."""
    before: Traceback | None = None
    at = 0
    while at < len(lines):
        if not _STARTS.search(lines[at].text):
            at += 1
            continue
        found, at = _traceback(lines, at)
        if found is None:
            continue
        found.before = before
        if found.exception.endswith("CheckpointException"):
            at = _taken_in(found, lines, at)
        linked = next(
            (i for i in range(at, min(at + 3, len(lines))) if lines[i].text.strip() in _LINKS), None
        )
        if linked is None:
            yield found
            before = None
        else:
            before, at = found, linked + 1


def _traceback(lines: list[Line], start: int) -> tuple[Traceback | None, int]:
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
                message = _asserted(lines[start + 1 : at])
            first, last, ended = lines[start].number, lines[at].number, lines[end - 1].number
            name, message = told_once(raised[1], message)
            found = Traceback(lines[start].stream, first, last, ended, name, message, frames)
            found.source = source_of(lines[start + 1 : at])
            return unwrapped(found), end
    return None, len(lines)


_TWICE = re.compile(r"(\w{6,60}?)\1+")


def told_once(name: str, message: str) -> tuple[str, str]:
    """An exception that several ranks printed at once into one line, as one of them would have."""
    match = _TWICE.fullmatch(name)
    return (match[1], message.lstrip(": ")) if match else (name, message)


_BECAUSE = re.compile(
    r"because of the following error \(look up to see its traceback\):\n(?P<inner>(?:.|\n)+)"
)
_OF_PYTHON = (
    ("ModuleNotFoundError", re.compile(r"No module named ")),
    (
        "ImportError",
        re.compile(
            r"cannot import name |(?<!\S)\S+: undefined symbol: |(?<!\S)\S+: cannot open shared object"
        ),
    ),
    ("AttributeError", re.compile(r"module '[\w.]+' has no attribute |'\w+' object has no attribute ")),
    ("TypeError", re.compile(r"unsupported operand type|(?<!\S)\S+\(\) got an unexpected")),
)
"""What Python says, by the exception that a lazy import leaves out."""


def unwrapped(failure: Traceback) -> Traceback:
    """The failure that a lazy import wraps into one of its own, with its own name; others as they are."""
    message = failure.message
    while match := _BECAUSE.search(message):
        message = match["inner"]
    if message != failure.message:
        named = _RAISED.match(message.split("\n")[0])
        if kind := next((name for name, pattern in _OF_PYTHON if pattern.match(message)), None):
            failure.exception, failure.message = kind, message
        elif named and named[2]:
            failure.exception, failure.message = named[1], named[2]
    if _NAMELESS.fullmatch(failure.message) and (module := _FROM.search(failure.source)):
        failure.message += f" from '{module['name']}'"  # Python before 3.7 does not say it
    return failure


_NAMELESS = re.compile(r"cannot import name '\w+'")
_FROM = re.compile(r"\bfrom (?P<name>\w[\w.]*) import\b")


def source_of(lines: list[Line]) -> str:
    """The code below the last frame. Marks of a notebook and of rich stand before it, carets below."""
    last = max((at for at, line in enumerate(lines) if frame_of(line.text)), default=len(lines))
    below = [line.text for line in (lines[last + 1 : last + 30] if last < len(lines) else lines[-10:])]
    if last == len(lines) and not any(_MARKED.match(text) for text in below):
        carets = next((at for at in range(len(below) - 1, 0, -1) if _CARETS.fullmatch(below[at])), 0)
        return below[carets - 1].strip() if carets else ""
    code = [re.sub(r"^[\s│|]*(?:[-❱>]+\s*)?(?:\d+\s)?\s*", "", text) for text in below[:2]]
    marked = next((text for text in below if _MARKED.match(text)), None)
    if marked:
        code = [_MARKED.sub("", marked, count=1)]
    return next((text.strip() for text in code if text.strip(" ^~│╰─╯")), "")


_MARKED = re.compile(r"\s{0,40}[│|]?\s{0,40}(?:-{1,40}>|❱)\s{0,8}\d{1,8}\s[\s│|]*")
"""What stands before the line that a notebook or rich marks as the one that failed."""


_CARETS = re.compile(r"^\s{0,300}[~^]{2}[~^ ]*$")
"""What Python 3.11 and later put below the part of a line of code that failed."""


def _taken_in(found: Traceback, lines: list[Line], at: int) -> int:
    """Put the tracebacks of ranks into the exception of torch's DCP that lists them; where they end."""
    inside: list[Traceback] = []
    while at < len(lines) and "(RANK " in lines[at].text and _STARTS.search(lines[at].text):
        one, at = _traceback(lines, at)
        inside += [one] if one else []
    if inside:
        found.before, found.message = inside[0], inside[0].said
        found.last, found.end = inside[0].last, inside[-1].end
    return at


def _asserted(lines: list[Line]) -> str:
    """The source of the assertion that a traceback ends in, which stands for a message that it lacks."""
    sources = [line.text.strip() for line in lines]
    return next((text for text in reversed(sources) if text.startswith("assert")), "")


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def frame_of(text: str) -> str | None:
    """A frame as `file:line function`, if a line shows one, as far as it tells them."""
    match = next((match for pattern in _FRAMES if (match := pattern.match(text))), None)
    if match is None:
        return None
    place = f"{match['file']}:{match['line']}" if match["line"] else match["file"]
    return f"{place} {match['name']}".rstrip()


def end_of_message(lines: list[Line], at: int) -> int:
    """Where the message of the exception in a line ends: the first line that is no part of it."""
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
