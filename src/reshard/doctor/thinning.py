"""Long logs made short while they are read: what repeats is dropped, what happened first or only once is kept.

A run of 512 ranks prints each warning 512 times and the line of a step thousands of times. Lines are alike if they
differ in digits only; of those alike the first few are kept, and of tracebacks that end in the same exception the first
few are kept whole. So the rank that failed first stays, and memory does not grow with the log.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator

from reshard.doctor.prefixes import START

WHOLE = 5_000
"""Lines at the beginning that are kept as they are: most logs are no longer."""
LAST = 8_000
"""Lines at the end that are kept: torchelastic's summary of 512 ranks has seven lines for each."""
ROOM = 32_000_000
"""Characters of new lines that are kept, and as many of the last ones: long lines that all differ fill memory, too."""
COPIES = 3
SHAPES = 400_000
"""Kinds of lines that are remembered; a log with more of them is thinned without looking at what is new."""
BLOCK = 600
"""Lines of a traceback that are followed."""

_DIGITS = re.compile(r"\d+")
_ENDS = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:: |:?$)")


def thinned(lines: Iterable[tuple[str, str]]) -> Iterator[tuple[int, str, str]]:
    """The lines of a log to look at, with their numbers from 1. A line is its stream and its text."""
    thinner = _Thinner()
    for number, (stream, text) in enumerate(lines, 1):
        thinner.add(number, stream, text)
    return thinner.result()


class _Thinner:
    """Counts what was seen, and follows the traceback that each stream is in."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[str, str]] = {}
        self._seen: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        self._open: dict[str, list[tuple[int, str]]] = {}
        self._last: deque[tuple[int, str, str]] = deque()
        self._room = self._room_at_end = ROOM

    def add(self, number: int, stream: str, text: str) -> None:
        if self._room > 0 and (number <= WHOLE or self._is_new(text)):
            self._kept[number] = stream, text
            self._room -= len(text)
        else:
            self._last.append((number, stream, text))
            self._room_at_end -= len(text)
            while len(self._last) > LAST or self._room_at_end < 0:
                self._room_at_end += len(self._last.popleft()[2])
        if START in text:
            self._open[stream] = [(number, text)]
        elif stream in self._open:
            self._follow(number, stream, text)

    def _is_new(self, text: str) -> bool:
        shape = _DIGITS.sub("0", text[:500])
        times = self._seen.get(shape, 0)
        if times or len(self._seen) < SHAPES:
            self._seen[shape] = times + 1
            return times < COPIES
        return False

    def _follow(self, number: int, stream: str, text: str) -> None:
        """Put a line to the traceback that its stream is in; at its end keep all of it, if it is one of the first."""
        block = self._open[stream]
        block.append((number, text))
        indent = len(block[0][1]) - len(block[0][1].lstrip())
        ends = len(text) - len(text.lstrip()) <= indent and _ENDS.match(text.lstrip())
        if not ends and len(block) < BLOCK:
            return
        del self._open[stream]
        shape = _DIGITS.sub("0", text)
        self._ends[shape] = self._ends.get(shape, 0) + 1
        if ends and self._ends[shape] <= COPIES:
            self._kept.update((at, (stream, line)) for at, line in block)

    def result(self) -> Iterator[tuple[int, str, str]]:
        self._kept.update((number, (stream, text)) for number, stream, text in self._last)
        return ((number, *self._kept[number]) for number in sorted(self._kept))
