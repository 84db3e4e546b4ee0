"""Signals that end a run: all ranks finish the same step, save a checkpoint, and end.

Each rank listens. Its engine calls `heard` after every step, agrees with the other ranks, saves, and raises
`StoppedRun`. Python runs a signal's handler between two of its own instructions, which a rank that waits in a
collective never reaches; so a thread reads which signals came, and ends the process if nothing else can.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.context import BaseContext, ForkContext, ForkProcess, SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

from reshard.base.interrupts import raising
from reshard.guard.supervise.child_processes import end_with_parent
from reshard.guard.supervise.signal_passing import PassedSignals

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals of schedulers, launchers and terminals before they end a process. SIGHUP stays ignored under nohup."""
SECOND_PRESS_SECONDS = 2.0
"""Seconds after which another Ctrl-C counts as a second one: launchers also forward the terminal's to the ranks."""


class StoppedRun(KeyboardInterrupt):
    """Raised if a signal ends the run. All ranks raise it after the same `step`; None means before the first one.

    `checkpoint` is that of the step, or None if it was not saved, for the reason `why`.
    """

    def __init__(
        self, number: int, step: int | None = None, checkpoint: Path | None = None, why: str = ""
    ) -> None:
        super().__init__(number)
        self.number, self.step, self.checkpoint, self.why = number, step, checkpoint, why

    @property
    def status(self) -> int:
        """The exit status as in a shell."""
        return 128 + self.number

    def __str__(self) -> str:
        by = f"interrupted by {signal.Signals(self.number).name}"
        if self.step is None:
            return f"{by}: {self.why}" if self.why else by
        return f"{by} after step {self.step}, which is {'saved' if self.checkpoint else f'not saved: {self.why}'}"


def late(number: int, seconds: int) -> StoppedRun:
    """A `StoppedRun` for a step and its checkpoint that took longer than `seconds`."""
    return StoppedRun(
        number,
        why=f"the step was not finished and saved within {seconds} seconds (--save-on-signal)"
        if seconds
        else "nothing is saved with --save-on-signal 0",
    )


EndCallback = Callable[[StoppedRun], None]


@dataclass
class _Listener:
    """Signals that this process received, and the seconds that a step may take afterwards; None for no limit."""

    seconds: int | None
    ended: EndCallback | None
    number: int = 0
    at: float = 0.0
    training: bool = False
    over: threading.Event = field(default_factory=threading.Event)

    def hear(self, number: int) -> None:
        """Record a signal. Before the first step, and at a second Ctrl-C, end the process."""
        now = time.monotonic()
        again = self.number and number == signal.SIGINT and now - self.at > SECOND_PRESS_SECONDS
        self.number, self.at = self.number or number, self.at or now
        if again:
            self._end(StoppedRun(self.number, why="a second Ctrl-C ended it"))
        elif not self.training:
            self._end(StoppedRun(self.number, why="no step was finished"))
        elif self.seconds == 0:
            self._end(late(self.number, 0))

    def watch(self, received: PassedSignals) -> None:
        """Hear signals until the run is over, and end the process at its deadline."""
        import select

        poll = select.poll()  # select.select takes no descriptor above 1,023
        poll.register(received.descriptor, select.POLLIN)
        while not self.over.is_set():
            left = self.at + self.seconds - time.monotonic() if self.number and self.seconds else None
            if left is not None and left <= 0:
                self._end(late(self.number, self.seconds or 0))
            poll.poll(None if left is None else 1000 * left)
            for number in received.come():
                if number in ENDING_SIGNALS:
                    self.hear(number)

    def _end(self, stop: StoppedRun) -> None:
        with suppress(Exception):  # an error in reporting must not prevent the end
            if self.ended:
                self.ended(stop)
        sys.stderr.flush()
        os._exit(stop.status)


_listener: _Listener | None = None


@contextmanager
def listening(seconds: int | None, ended: EndCallback | None = None) -> Iterator[None]:
    """Listen for the signals of `ENDING_SIGNALS`. `ended` is called in another thread, before the process ends itself.

    `seconds` limits what a step and its checkpoint may take; None if the launcher enforces a limit.
    """
    global _listener
    _listener = listener = _Listener(seconds, ended)
    with PassedSignals(ENDING_SIGNALS, apart=True) as received:
        # Forked processes handle their own signals: SIGTERM ends the workers of a DataLoader.
        os.register_at_fork(after_in_child=received.restore)
        thread = threading.Thread(target=listener.watch, args=(received,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            listener.over.set()
            received.wake()
            thread.join()
            _listener = None


def with_steady_workers(loader: Any) -> Any:
    """A torch DataLoader whose workers ignore signals from other processes than the one that they work for.

    Ctrl-C and schedulers signal all processes. If a worker dies of a signal, the step that should be saved fails.
    """
    inner = getattr(loader, "base_dataloader", loader)  # accelerate's wraps the one that has the workers
    if inner.num_workers:
        inner.worker_init_fn = partial(_be_steady, inner.worker_init_fn)
        chosen = inner.multiprocessing_context
        inner.multiprocessing_context = CONTEXTS[chosen.get_start_method() if chosen else "fork"]()
    return loader


class _Begun:
    """A process that starts with the signals of `ENDING_SIGNALS` blocked, until it can ignore them."""

    def start(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
        try:
            super().start()  # type: ignore[misc]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Forked(_Begun, ForkProcess):
    pass


class _Spawned(_Begun, SpawnProcess):
    pass


class _Fork(ForkContext):
    Process = _Forked


class _Spawn(SpawnContext):
    Process = _Spawned


CONTEXTS: dict[str, type[BaseContext]] = {"fork": _Fork, "spawn": _Spawn}
"""How workers are started. SIGTERM ends a forkserver, Python's default from 3.14, and with it the workers."""


def _be_steady(before: Callable[[int], Any] | None, number: int) -> None:
    """In a worker: end with the parent, and on SIGTERM from the parent; then run the loader's own function."""
    end_with_parent()
    for each in ENDING_SIGNALS:
        if each != signal.SIGTERM:
            signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # for the thread, which sees the sender
    threading.Thread(target=_end_when_asked, args=(os.getppid(),), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*ENDING_SIGNALS} - {signal.SIGTERM})
    if before:
        before(number)


def _end_when_asked(parent: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)


def unevaluated(step: int) -> str:
    """A note about an evaluation that was due when a signal stopped the run: it could take too long."""
    return f"the evaluation after step {step} was skipped, because a signal stops the run; --resume does not repeat it"


def hold() -> None:
    """Make signals wait for the end of the step from now on."""
    if _listener:
        _listener.training = True


def heard() -> int:
    """The signal that this process has received, 0 if none."""
    return _listener.number if _listener else 0


def raised() -> AbstractContextManager[None]:
    """Make the signals of `ENDING_SIGNALS` raise `StoppedRun`, while no step runs."""
    return raising(ENDING_SIGNALS, partial(StoppedRun, why="no step was going on"))
