"""Which lines of a command's output watchers read: all of them, but of a flood only some.

A watcher needs a tenth of a millisecond for a line. A command that prints its data prints a million lines in a second.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

LAST_LINES = 256
"""Lines that are read of those since the last look, counted from the end."""
LOSS_LINES = 32
"""Lines with a loss that are read besides."""


class PrintedLine(NamedTuple):
    """A line, and when it was printed, in seconds since the epoch."""

    time: float
    text: bytes


class LineSample:
    """Keeps the lines that are read at the next look."""

    def __init__(self) -> None:
        self._losses: deque[PrintedLine] = deque(maxlen=LOSS_LINES)
        self._last: deque[PrintedLine] = deque()

    def add(self, time: float, lines: list[bytes]) -> None:
        """Lines that were printed at a time."""
        early, late = lines[:-LAST_LINES], lines[-LAST_LINES:]
        losses = [line for line in early if b"loss" in line][-LOSS_LINES:]
        self._last.extend(PrintedLine(time, line) for line in (*losses, *late) if line.strip())
        while len(self._last) > LAST_LINES:
            line = self._last.popleft()
            if b"loss" in line.text:
                self._losses.append(line)

    def taken(self) -> list[PrintedLine]:
        """The lines since the last call, in their order."""
        taken = [*self._losses, *self._last]
        self._losses.clear()
        self._last.clear()
        return taken
