"""Progress of a call in a notebook, which has no terminal for a bar."""

from __future__ import annotations

import sys
import time
from threading import Lock
from typing import Any

REFRESH_SECONDS = 0.2
"""Seconds between two updates of a bar: each one is a message to the browser."""


class NotebookBar:
    """IPython's progress bar in the kernel of a notebook; does nothing elsewhere. Threads may advance it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._bar: Any = None
        self._done, self._due = 0, 0.0

    def begin(self, total: int, done: int = 0) -> None:
        """Show the bar for a task of `total` bytes, `done` of them already done."""
        if not is_kernel() or not total:
            return
        from IPython.display import ProgressBar

        self._bar, self._done = ProgressBar(total), done
        self._bar.display()
        self.advance(0)

    def begin_at(self, done: int) -> None:
        """Show that `done` bytes were finished before."""
        self._done = done
        self.advance(0)

    def advance(self, count: int) -> None:
        """Add `count` finished bytes."""
        with self._lock:
            self._done += count
            is_over = self._bar is not None and self._done >= self._bar.total
            if self._bar is not None and (is_over or time.monotonic() >= self._due):
                self._bar.progress = min(self._done, self._bar.total)
                self._due = time.monotonic() + REFRESH_SECONDS


def is_kernel() -> bool:
    """Whether this process runs the cells of a notebook. Does not import IPython: a kernel already has."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")
