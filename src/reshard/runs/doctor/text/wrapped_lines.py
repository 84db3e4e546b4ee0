"""Lines that a terminal wrapped: copied from its window, a line of a log is several, each as long as it is wide.

The width is learned from frames of tracebacks: a line that ends inside `File "…", line 5, in f` and that the next one
completes was wrapped. From then on, a line of exactly this length continues in the next one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

NARROWEST, WIDEST = 40, 400
"""Characters in a line of a terminal."""
MAX_JOINED = 12_000
"""Characters to which lines are joined."""

_FRAME = re.compile(r'File "[^"\n]{1,2000}", line \d+, in \S')
_UNFINISHED = re.compile(r'File "[^"\n]*(?:"[, a-z\d]{0,16})?$')
_BEGINS = re.compile(r"\s{2}|$|\[|Traceback \(|(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Warning)\b")
"""A line that continues no other: indented, empty, with a prefix, or an exception."""
_COMPLETE = re.compile(r"[│╭╮╰╯┃|]\s*$|\d%\|")
"""Rows of boxes and progress bars are as wide as the terminal without continuing."""


def rejoined(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """The lines as they were before a terminal wrapped them, each with the number of its first one (from 1)."""
    width, first, whole, last = 0, 0, "", ""
    for number, line in enumerate(lines, 1):
        if not width and 'File "' in last:
            width = _width(last, line)
        if width and len(last) == width and len(whole) < MAX_JOINED and _continues(last, line):
            whole, last = whole + line, line
            continue
        if first:
            yield first, whole
        first, whole, last = number, line, line
    if first:
        yield first, whole


def _continues(line: str, following: str) -> bool:
    return not _COMPLETE.search(line) and not _BEGINS.match(following)


def _width(line: str, following: str) -> int:
    """The width of the terminal, if the second of these lines completes the frame that the first one begins; else 0."""
    if not NARROWEST <= len(line) <= WIDEST or not _UNFINISHED.search(line):
        return 0
    begin = line.rindex('File "')
    return len(line) if _FRAME.match(line + following, begin) and not _FRAME.match(line, begin) else 0
