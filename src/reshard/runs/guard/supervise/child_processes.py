"""Child processes that end with their parent, and the list of a process's children."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
"""Linux, prctl(2)."""


def end_with_parent(signum: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Make the kernel send this process a signal when its parent ends, however that ends. Linux only.

    `parent` is the parent's process id, to detect a parent that has already ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum))
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), signum)


def children(parent: int) -> Iterator[int]:
    """The running child processes of a process. Linux only."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            words = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(words[1]) == parent:  # proc(5): state, then the parent
                yield int(stat.parent.name)
