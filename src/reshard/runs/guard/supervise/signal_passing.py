"""Signals that a guard receives and its command may not have: schedulers signal one process, terminals all of them.

The kernel does not say whether a signal was sent to one process or to its group. So a second process of the guard, the
sentinel, waits in the same group: what it receives as well, the command has received, too. Passing that on would be a
second signal, which launchers take for the wish to end at once.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any

from reshard.runs.guard.supervise.child_processes import end_with_parent

ENDING_SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
"""Signals by which people and schedulers end a run, or announce its end."""
_OWN_SIGNALS = {
    getattr(signal, f"SIG{name}", None)
    for name in (
        *("KILL", "STOP", "CHLD"),
        *("TSTP", "TTIN", "TTOU"),  # which stop the guard, too
        *("SEGV", "BUS", "FPE", "ILL", "TRAP", "SYS", "PIPE", "XFSZ"),  # which it causes itself
    )
}
STOPPED = "stopped by {} after step {}, which is saved"
"""The line of `reshard.guard.callback` on each node when a signal has ended a run; launchers report exit status 1."""
PASSED_SIGNALS = tuple(sorted(signal.valid_signals() - _OWN_SIGNALS))
"""All that somebody else may send to a command."""
SENTINEL_SECONDS = 0.2
"""Seconds in which the sentinel receives what was sent to the group."""


class PassedSignals:
    """A context in which signals do not end this process.

    `descriptor` becomes readable when one has come, or when a child process has ended. `apart` is whether the command
    has a session of its own, so that it receives no signal by itself. Python handles signals in its main thread only:
    in others, none is seen.
    """

    def __init__(self, *, apart: bool = False) -> None:
        self._apart = apart
        self.first = 0
        """The first signal that came to end the run, 0 if none has."""
        # as those of `nohup` and of `&` in a script
        self._ignored = {each for each in PASSED_SIGNALS if signal.getsignal(each) is signal.SIG_IGN}
        self._is_main = threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> PassedSignals:
        self.descriptor, self._into = os.pipe()
        for each in (self.descriptor, self._into):
            os.set_blocking(each, False)
        if not self._is_main:
            return self
        self._sentinel, self._group = _sentinel()
        self._before = {each: signal.signal(each, _nothing) for each in (*PASSED_SIGNALS, signal.SIGCHLD)}
        self._wakeup = signal.set_wakeup_fd(self._into, warn_on_full_buffer=False)
        return self

    def come(self) -> Iterator[int]:
        """The signals that have come since the last call."""
        with suppress(BlockingIOError):
            yield from os.read(self.descriptor, 256)

    def restore(self) -> None:
        """Handle signals as before; also in a forked process, which has its own."""
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
        while self._before:
            signal.signal(*self._before.popitem())

    def to_pass(self, number: int) -> bool:
        """Whether a signal has to be passed on to the command."""
        if number not in PASSED_SIGNALS:
            return False
        if number in ENDING_SIGNALS and number not in self._ignored:
            self.first = self.first or number
        if self._apart:
            return number not in self._ignored
        poll = select.poll()
        poll.register(self._group, select.POLLIN)
        while poll.poll(1000 * SENTINEL_SECONDS):
            if os.read(self._group, 1) == bytes([number]):
                return False
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
        if self._is_main:
            os.kill(self._sentinel, signal.SIGKILL)
            os.waitpid(self._sentinel, 0)
            os.close(self._group)
        for each in (self.descriptor, self._into):
            os.close(each)
        self.restore()  # last: from now on, Ctrl-C raises KeyboardInterrupt


def signal_name(number: int) -> str:
    """The name of a signal, as SIGKILL for 9, and who sends it if a program cannot have done it itself."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    hint = ": by the out-of-memory killer, a scheduler or a person" if number == signal.SIGKILL else ""
    return f"{name}{hint}"


def _nothing(number: int, frame: Any) -> None:
    """The handler: the number is in the pipe."""


def _sentinel() -> tuple[int, int]:
    """Start the sentinel. Returns its process id, and a pipe with the signals that it receives, a byte for each."""
    parent = os.getpid()
    out, into = os.pipe()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_SIGNALS)
    child = os.fork()
    if not child:
        end_with_parent(signal.SIGKILL, parent)
        os.closerange(0, into)  # what it held open would never end
        os.closerange(into + 1, os.sysconf("SC_OPEN_MAX"))
        while True:
            os.write(into, bytes([signal.sigwait(PASSED_SIGNALS)]))
    os.close(into)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return child, out
