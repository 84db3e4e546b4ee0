"""What the report reads of a log: all of it, or the parts of a long one in which the cause of a failure may be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO

HEAD_BYTES = 128 << 10
"""Of the beginning, which has the command, its settings and versions."""
TRACEBACK = b"Traceback (most recent call last)"
MAX_TRACEBACKS = 4
"""Tracebacks that are read, the first ones: the first failure may be far from the end of a long log."""
TRACEBACK_BYTES = 64 << 10
"""Before and after the start of a traceback."""
TAIL_BYTES = 512 << 10
"""Of the end, which has the last words of each rank, and the launcher's summary."""


def read_parts(log: Path) -> str:
    """The beginning and the end of a log, and what is around its first tracebacks.

    Raises OSError if it cannot be read.
    """
    with log.open("rb") as file:
        size = file.seek(0, 2)
        content = b""
        file.seek(0)
        for begin, end in _joined(_parts(size, islice(_tracebacks(file), MAX_TRACEBACKS))):
            file.seek(begin)
            part = file.read(end - begin)
            content += part if begin == 0 else b"\n" + part.partition(b"\n")[2]
    return content.decode("utf-8", "replace")


def _parts(size: int, tracebacks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The first byte of each part, and the one after its last."""
    yield 0, HEAD_BYTES
    for place in tracebacks:
        yield max(place - TRACEBACK_BYTES, 0), place + TRACEBACK_BYTES
    yield max(size - TAIL_BYTES, 0), size


def _tracebacks(file: IO[bytes]) -> Iterator[int]:
    """Where tracebacks begin."""
    place = 0
    for line in file:
        if TRACEBACK in line:
            yield place
        place += len(line)


def _joined(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Parts in order, overlapping ones as one."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(parts):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
