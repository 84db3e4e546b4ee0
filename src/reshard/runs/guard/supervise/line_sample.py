"""Which lines of a command's output are read by watchers: all of them, but of a flood only some.

A watcher needs a tenth of a millisecond for a line. A command that prints its data prints a million lines in a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

LINES_PER_SECOND = 256
"""Lines above which output is a flood."""
LAST_LINES = 32
"""Lines of a flood that are read at least: so many of the last ones, and of the last ones with a loss."""
SECOND = 1.0


class LineSample:
    """Chooses lines of one stream. Those of a flood that have to wait are chosen when its second is over."""

    def __init__(self) -> None:
        self._end = 0.0
        self._left = 0
        self._losses: deque[bytes] = deque(maxlen=LAST_LINES)
        self._last: Sequence[bytes] = ()

    def chosen(self, now: float, lines: Sequence[bytes]) -> list[bytes]:
        """The lines to read now. `now` is in seconds, by any clock."""
        waited = self.waiting(now)
        if len(lines) <= self._left:
            self._left -= len(lines)
            return [*waited, *lines]
        losses = _with_loss(lines[:-LAST_LINES])[-LAST_LINES:]
        last = lines[-LAST_LINES:]
        if len(losses) + len(last) <= self._left:
            self._left -= len(losses) + len(last)
            return [*waited, *losses, *last]
        self._losses.extend(_with_loss(self._last))
        self._losses.extend(losses)
        self._last = last
        return waited

    def waiting(self, now: float | None = None) -> list[bytes]:
        """The lines that waited for the end of their second, if it is over; without `now`, at the end of the output."""
        if now is not None and now < self._end:
            return []
        waited = [*self._losses, *self._last]
        self._losses.clear()
        self._last = ()
        if now is not None:
            self._end, self._left = now + SECOND, LINES_PER_SECOND
        return waited


def _with_loss(lines: Iterable[bytes]) -> list[bytes]:
    return [line for line in lines if b"loss" in line]
