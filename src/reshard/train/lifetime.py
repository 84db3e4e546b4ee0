"""No process outlives the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Linux, prctl(2)."""


def end_with_parent(signum: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Let the kernel send this process a signal when its parent ends, however that ends. On Linux.

    `parent` is its process id, by which a parent is noticed that has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum))
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), signum)
