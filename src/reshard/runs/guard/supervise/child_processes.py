"""Child processes that end with their parent."""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1
"""Linux, prctl(2)."""


def end_with_parent(signum: int, parent: int) -> None:
    """Make the kernel send this process a signal when its parent ends, however that ends. Linux only.

    `parent` is the parent's process id: it may have ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum))
        if os.getppid() != parent:
            os.kill(os.getpid(), signum)
