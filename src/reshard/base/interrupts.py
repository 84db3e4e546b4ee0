"""Ctrl-C while the modules of a command are imported, when nothing has begun that would have to be ended."""

from __future__ import annotations

import os
import signal

ENDED = 128 + signal.SIGINT
"""Exit status after Ctrl-C, as for a program that SIGINT ends."""


def _end(*_: object) -> None:
    os._exit(ENDED)  # an exception would print a traceback, or be taken for a failed import


def end_at_once() -> None:
    """Let Ctrl-C end the process, unless it is ignored, as `nohup` and `&` let it be."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, which commands handle."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
