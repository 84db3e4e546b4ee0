"""Threads that begin together and end together, whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from threading import Event
from typing import TypeVar

T = TypeVar("T")


def together(work: Callable[[int, Event], T], threads: int) -> list[T]:
    """What `work(index, stopped)` returned on each of `threads` threads, or of as many as the system gives.

    So the threads share what there is to do; where the system gives none, this one does it alone.

    The first exception, and Ctrl-C, set `stopped`: work that looks at it often ends soon, and nothing is still at
    work when the exception comes out of here.
    """
    begin, stopped = Event(), Event()

    def run(index: int) -> T:
        # Ctrl-C can come between the start of a thread and the pool's knowing it; the pool then waits for all
        # threads but that one, so none may work before all are known.
        begin.wait()
        if stopped.is_set():
            raise CancelledError
        return work(index, stopped)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="reshard")
    futures: list[Future[T]] = []
    try:
        with suppress(RuntimeError):  # "can't start new thread": a limit of the user or of the container
            for index in range(threads):
                futures.append(pool.submit(run, index))
        begin.set()
        if not futures:
            return [work(0, stopped)]
        pending = set(futures)
        while pending:
            # Only a wait that ends by itself lets Ctrl-C through on every system.
            done, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
    finally:
        _end(pool, futures, begin, stopped)
    return [future.result() for future in futures]


def _end(pool: ThreadPoolExecutor, futures: list[Future[T]], begin: Event, stopped: Event) -> None:
    """Wait for all threads, whoever presses Ctrl-C meanwhile: they end soon, and what they write to is cleared next."""
    again: KeyboardInterrupt | None = None
    while True:
        try:
            stopped.set()
            begin.set()
            wait(futures)  # until Python 3.12, a join that Ctrl-C interrupts takes the thread for ended
            pool.shutdown()
            break
        except KeyboardInterrupt as error:
            again = error
    if again:
        raise again
