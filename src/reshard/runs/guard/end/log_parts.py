"""What the report reads of a log: all of it, or the parts of a long one in which the cause of a failure may be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

HEAD_BYTES = 128 << 10
"""Of the beginning, which has the command, its settings and versions."""
TRACEBACK_BYTES = 64 << 10
"""Before and after the start of a traceback."""
TAIL_BYTES = 512 << 10
"""Of the end, which has the last words of each rank, and the launcher's summary."""


def read_parts(log: Path, tracebacks: Iterable[int] = ()) -> str:
    """The beginning and the end of a log, and what is around its first tracebacks, which begin at `tracebacks`.

    Raises OSError if it cannot be read.
    """
    with log.open("rb") as file:
        size = file.seek(0, 2)
        content = b""
        for begin, end in _joined(_parts(size, tracebacks)):
            file.seek(begin)
            part = file.read(end - begin)
            content += part if begin == 0 else b"\n" + part.partition(b"\n")[2]
    return content.decode("utf-8", "replace")


def _parts(size: int, tracebacks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The first byte of each part, and the one after its last."""
    yield 0, HEAD_BYTES
    for place in sorted(tracebacks):
        yield max(place - TRACEBACK_BYTES, 0), place + TRACEBACK_BYTES
    yield max(size - TAIL_BYTES, 0), size


def _joined(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Parts in order, overlapping ones as one."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(parts):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
