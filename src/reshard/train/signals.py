"""Signals that ask a run to end: the step is finished, a checkpoint is saved, and all ranks end after the same step.

Each rank listens. Its engine asks `heard` after every step, agrees with the other ranks, saves, and raises `Stopped`.
Python runs a signal's handler between two of its own instructions, which a rank that waits for another one in a
collective never reaches; so a thread reads which signals came, and ends the process where nothing else would.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.context import BaseContext, ForkContext, ForkProcess, SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

from reshard.train.lifetime import end_with_parent

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""What schedulers, launchers and terminals send before they end a process. SIGHUP stays ignored under nohup."""
SECONDS = 600
"""`--save-on-signal`: how long a step and its checkpoint may take after a signal."""
AGAIN = 2.0
"""Seconds after which a second Ctrl-C is one: launchers pass on what a terminal has sent to the ranks as well."""


class Stopped(KeyboardInterrupt):
    """A signal has ended the run. All ranks raise it after the same `step`; None is before the first one.

    `checkpoint` is what was saved of that step, and None where `why` it was not.
    """

    def __init__(
        self, number: int, step: int | None = None, checkpoint: Path | None = None, why: str = ""
    ) -> None:
        super().__init__(number)
        self.number, self.step, self.checkpoint, self.why = number, step, checkpoint, why

    @property
    def status(self) -> int:
        """The exit status, as a shell has it."""
        return 128 + self.number

    def __str__(self) -> str:
        by = f"interrupted by {signal.Signals(self.number).name}"
        if self.step is None:
            return f"{by}: {self.why}" if self.why else by
        return f"{by} after step {self.step}, which is {'saved' if self.checkpoint else f'not saved: {self.why}'}"


def late(number: int, seconds: int) -> Stopped:
    """What to say where a step and its checkpoint took longer than `seconds`."""
    return Stopped(
        number,
        why=f"the step was not finished and saved within {seconds} seconds (--save-on-signal)"
        if seconds
        else "nothing is saved with --save-on-signal 0",
    )


Ended = Callable[[Stopped], None]


@dataclass
class _Listener:
    """What this process has heard, and how long a step may take after it: for ever where `seconds` is None."""

    seconds: int | None
    ended: Ended | None
    number: int = 0
    at: float = 0.0
    training: bool = False
    over: threading.Event = field(default_factory=threading.Event)

    def hear(self, number: int) -> None:
        """Take a signal in. Before the first step, and at a second Ctrl-C, the process ends here."""
        now = time.monotonic()
        again = self.number and number == signal.SIGINT and now - self.at > AGAIN
        self.number, self.at = self.number or number, self.at or now
        if again:
            self._end(Stopped(self.number, why="a second Ctrl-C ended it"))
        elif not self.training:
            self._end(Stopped(self.number, why="no step was finished"))
        elif self.seconds == 0:
            self._end(late(self.number, 0))

    def watch(self, pipe: int) -> None:
        """Hear what the pipe says until the run is over, and end the process at its deadline."""
        import select

        poll = select.poll()  # select.select takes no descriptor above 1,023
        poll.register(pipe, select.POLLIN)
        while not self.over.is_set():
            left = self.at + self.seconds - time.monotonic() if self.number and self.seconds else None
            if left is not None and left <= 0:
                self._end(late(self.number, self.seconds or 0))
            ready = poll.poll(None if left is None else 1000 * left)
            for number in os.read(pipe, 64) if ready else b"":
                if number in ENDING:
                    self.hear(number)

    def _end(self, stop: Stopped) -> None:
        with suppress(Exception):  # whatever keeps the end from being told, it comes
            if self.ended:
                self.ended(stop)
        sys.stderr.flush()
        os._exit(stop.status)


_listener: _Listener | None = None


@contextmanager
def listening(seconds: int | None, ended: Ended | None = None) -> Iterator[None]:
    """Hear the signals of `ENDING`. `ended` is called in another thread, right before the process ends itself.

    `seconds` bounds what a step and its checkpoint may take; None where the launcher sees to that.
    """
    global _listener
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may have handlers
        return
    _listener = listener = _Listener(seconds, ended)
    out, into = os.pipe()
    os.set_blocking(into, False)
    numbers = [
        each for each in ENDING if signal.getsignal(each) is not signal.SIG_IGN or each != signal.SIGHUP
    ]
    before = {each: signal.signal(each, _nothing) for each in numbers}
    pipe = signal.set_wakeup_fd(into, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: _forget(listener, before))
    thread = threading.Thread(target=listener.watch, args=(out,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.over.set()
        signal.set_wakeup_fd(pipe)
        os.write(into, b"\0")
        thread.join()
        for each, handler in before.items():
            signal.signal(each, handler)
        os.close(out)
        os.close(into)
        _listener = None


def _nothing(number: int, frame: Any) -> None:
    """What Python calls; the thread has heard it already."""


def _forget(listener: _Listener, before: dict[signal.Signals, Any]) -> None:
    """In a forked child, whose signals are its own: workers of a DataLoader are ended by SIGTERM."""
    if listener.over.is_set():
        return
    listener.over.set()
    signal.set_wakeup_fd(-1)
    for each, handler in before.items():
        signal.signal(each, handler)


def with_steady_workers(loader: Any) -> Any:
    """A torch DataLoader whose workers ignore signals that are not from the process that they work for.

    Ctrl-C and schedulers send theirs to all processes. A worker that dies of one fails the step that should be saved.
    """
    inner = getattr(loader, "base_dataloader", loader)  # accelerate's asks another one, which has the workers
    if inner.num_workers:
        inner.worker_init_fn = partial(_be_steady, inner.worker_init_fn)
        chosen = inner.multiprocessing_context
        inner.multiprocessing_context = WAYS[chosen.get_start_method() if chosen else "fork"]()
    return loader


class _Begun:
    """A process that begins with the signals of `ENDING` blocked: one would end it until it can say otherwise."""

    def start(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
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


WAYS: dict[str, type[BaseContext]] = {"fork": _Fork, "spawn": _Spawn}
"""How workers are started. A forkserver, Python's default from 3.14, ends with SIGTERM, and they with it."""


def _be_steady(before: Callable[[int], Any] | None, number: int) -> None:
    """In a worker: end with the process that it works for, and with SIGTERM from there; go on with the loader's own."""
    end_with_parent()
    for each in ENDING:
        if each != signal.SIGTERM:
            signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # for the thread, which sees who sends it
    threading.Thread(target=_end_when_asked, args=(os.getppid(),), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*ENDING} - {signal.SIGTERM})
    if before:
        before(number)


def _end_when_asked(parent: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)


def unevaluated(step: int) -> str:
    """What to say of an evaluation that is due when a signal stops the run: it could take longer than there is time."""
    return f"the evaluation after step {step} was skipped, because a signal stops the run; --resume does not repeat it"


def hold() -> None:
    """From now on a signal waits for the end of the step."""
    if _listener:
        _listener.training = True


def heard() -> int:
    """The signal that this process has heard, 0 if none."""
    return _listener.number if _listener else 0


@contextmanager
def raised() -> Iterator[None]:
    """Let the signals of `ENDING` raise `Stopped`, where no step goes on."""

    def stop(number: int, frame: Any) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # it is ending
        raise Stopped(number, why="no step was going on")

    is_main = threading.current_thread() is threading.main_thread()
    free = [each for each in ENDING if signal.getsignal(each) is not signal.SIG_IGN] if is_main else []
    before = {each: signal.signal(each, stop) for each in free}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
