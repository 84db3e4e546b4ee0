"""Run work on several threads, all of which have ended when it returns or raises."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from threading import Event
from typing import TypeVar

T = TypeVar("T")


def together(work: Callable[[int, Event], T], threads: int) -> list[T]:
    """The results of `work(index, stopped)` on each of `threads` threads, or on as many as the system allows.

    The threads therefore share one pool of work; if the system allows none, the calling thread does it alone.

    The first exception, or Ctrl-C, sets `stopped`: work that checks it often ends soon, and no thread is still
    running when the exception is raised here.
    """
    begin, stopped = Event(), Event()

    def run(index: int) -> T:
        # Ctrl-C can come between the start of a thread and its registration in the pool; the pool then waits for all
        # threads but that one, so none may work before all are registered.
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
            # Only a wait with a timeout lets Ctrl-C through on every system.
            done, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
    finally:
        despite_ctrl_c(lambda: _end(pool, futures, begin, stopped))
    return [future.result() for future in futures]


def taken(waiting: deque[T], stopped: Event) -> Iterator[T]:
    """Items of a queue that several threads share, until it is empty or the work is stopped."""
    with suppress(IndexError):
        while not stopped.is_set():
            yield waiting.popleft()


def _end(pool: ThreadPoolExecutor, futures: list[Future[T]], begin: Event, stopped: Event) -> None:
    """Wait for all threads: they end soon, and the files that they write are removed next."""
    stopped.set()
    begin.set()
    wait(futures)  # until Python 3.12, a join that Ctrl-C interrupts marks the thread as ended
    pool.shutdown()


def despite_ctrl_c(action: Callable[[], object]) -> None:
    """Run `action` to its end despite Ctrl-C: repeat it, and raise KeyboardInterrupt when it is done."""
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            action()
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt:
        raise interrupt
