"""End the process quietly: on Ctrl-C while a command imports its modules, and on signals while it runs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

INTERRUPTED_STATUS = 128 + signal.SIGINT
"""Exit status after Ctrl-C, as for a program that SIGINT ends."""


def _end(*_: object) -> None:
    os._exit(INTERRUPTED_STATUS)  # an exception would print a traceback, or be taken for a failed import


def end_at_once() -> None:
    """Let Ctrl-C end the process, unless it is ignored, as `nohup` and `&` let it be."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, which commands handle."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore_from_now_on() -> None:
    """Let Ctrl-C change nothing any more: what this process ends with is decided."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def ignored() -> Iterator[None]:
    """Let Ctrl-C change nothing meanwhile."""
    before = signal.getsignal(signal.SIGINT)
    ignore_from_now_on()
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before or signal.SIG_DFL)


@contextmanager
def raising(numbers: Sequence[signal.Signals], error: Callable[[int], BaseException]) -> Iterator[None]:
    """Let signals raise an error, made from their number, and then ignore them: the program is already ending.

    Ignored signals stay ignored: nohup does that to SIGHUP. Only the main thread may have handlers.
    """

    def end(number: int, frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise error(number)

    is_main = threading.current_thread() is threading.main_thread()
    free = [each for each in numbers if signal.getsignal(each) is not signal.SIG_IGN] if is_main else []
    before = {each: signal.signal(each, end) for each in free}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
