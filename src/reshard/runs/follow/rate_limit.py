"""A limit of how fast a conversion reads and writes: after each window, its threads sleep until it is kept."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Lock

IO = Path("/proc/self/io")
"""What Linux counts of this process."""


def moved_bytes() -> int:
    """The bytes that this process has read and written; 0 if the system does not count them."""
    return sum(map(int, re.findall(r"[rw]char: (\d+)", IO.read_text()))) if IO.exists() else 0


def rate_limit(
    rate: int,
    stop: Event,
    clock: Callable[[], float] = time.monotonic,
    moved: Callable[[], int] = moved_bytes,
) -> Callable[[int], None]:
    """A callback for the bytes of each window that was written. Where nothing is counted, as many were read.

    `rate` is in bytes per second. `stop` ends the sleeping.
    """
    begin, before, lock, written = clock(), moved(), Lock(), 0

    def wait(nbytes: int) -> None:
        nonlocal written
        with lock:  # all threads sleep
            written += nbytes
            done = max(moved() - before, 2 * written)
            stop.wait(max(0.0, done / rate - (clock() - begin)))

    return wait
