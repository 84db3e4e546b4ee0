"""Lines that a terminal wrapped: copied from its window, a line of a log is several, each as long as it is wide.

The width is learned from frames of tracebacks: a line that ends inside `File "…", line 5, in f` and that the next one
completes was wrapped. From then on, a line of exactly this length continues in the next one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

NARROWEST, WIDEST = 40, 400
"""Characters in a line of a terminal."""
MOST = 30
"""Maximum lines into which one is wrapped."""

_FRAME = re.compile(r'File "[^"\n]{1,2000}", line \d+, in \S')
_NAME_CUT = re.compile(r'File "[^"\n]+", line \d+, in [\w.<>]*$')
_REST = re.compile(r"[a-z_\d>.][\w.<>]*$")
"""A frame that may end inside the name of its function, and the rest of the name: no code, which is indented, and no
exception."""
_UNFINISHED = re.compile(r'File "[^"\n]*(?:"[, a-z\d]{0,16})?$')
_BEGINS = re.compile(r"\s{2}|$|\[|Traceback \(|(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Warning)\b")
"""A line that continues no other: indented, empty, with a prefix, or an exception."""
_COMPLETE = re.compile(r"[│╭╮╰╯┃|]\s*$|\d%\|")
"""Rows of boxes and progress bars are as wide as the terminal without continuing."""


def rejoined(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """The lines as they were before a terminal wrapped them, each with the number of its first one (from 1)."""
    width = 0
    held: list[tuple[int, str]] = []
    for number, line in enumerate(lines, 1):
        if not held and not width and 'File "' not in line:
            yield number, line
            continue
        if width and held and _BEGINS.match(line):
            yield _one(held)
            held = []
        held.append((number, line))
        width = width or _width(held)
        if not width and 'File "' in line:
            yield from held[:-1]
            held = held[-1:]
        if len(held) < MOST and (_continues(line, width) if width else _may_continue(held)):
            continue
        yield from [_one(held)] if width else held
        held = []
    yield from [_one(held)] if width and held else held


def _one(held: list[tuple[int, str]]) -> tuple[int, str]:
    return held[0][0], "".join(text for _, text in held)


def _continues(line: str, width: int) -> bool:
    return len(line) == width and not _COMPLETE.search(line)


def _may_continue(held: list[tuple[int, str]]) -> bool:
    """Whether these lines, of one length, end inside a frame."""
    length = len(held[0][1])
    same = NARROWEST <= length <= WIDEST and all(len(text) == length for _, text in held)
    whole = _one(held)[1]
    return same and bool(_UNFINISHED.search(whole) or _NAME_CUT.search(whole))


def _width(held: list[tuple[int, str]]) -> int:
    """The width of the terminal, if the last of these lines completes the frame that the first one begins; else 0."""
    first, last = held[0][1], held[-1][1]
    if len(held) < 2 or (_NAME_CUT.search(first) and not _REST.match(last)):
        return 0
    return len(first) if _FRAME.match(_one(held)[1], first.rindex('File "')) else 0
