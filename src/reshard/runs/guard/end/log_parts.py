"""What the report reads of a log: all of it, or the parts of a long one in which the cause of a failure may be."""

from __future__ import annotations

from collections import deque
from itertools import islice
from pathlib import Path

from reshard.runs.doctor.text.text_files import shortened

HEAD_LINES = 1_000
"""Of the beginning, which has the command, its settings and versions."""
TRACEBACK = b"Traceback (most recent call last)"
MAX_TRACEBACKS = 4
"""Tracebacks that are read, the first ones: the first failure may be far from the end of a long log."""
LINES_AROUND = 500
"""Before and after the start of a traceback."""
TAIL_LINES = 5_000
"""Of the end, which has the last words of each rank, and the launcher's summary of 512 ranks, seven lines for each."""


def read_parts(log: Path) -> str:
    """The beginning and the end of a log, and what is around its first tracebacks.

    Raises OSError if it cannot be read.
    """
    kept: dict[int, bytes] = {}
    last: deque[tuple[int, bytes]] = deque(maxlen=TAIL_LINES)
    tracebacks, end = 0, HEAD_LINES
    with log.open("rb") as file:
        for number, line in enumerate(file):
            if tracebacks < MAX_TRACEBACKS and TRACEBACK in line:
                tracebacks += 1
                end = max(end, number + LINES_AROUND)
                kept.update(islice(reversed(last), LINES_AROUND))
            if number < end:
                kept[number] = line
            last.append((number, line))
    kept.update(last)
    return "".join(shortened(kept[number].decode("utf-8", "replace")) for number in sorted(kept))
