"""Threads that begin together and end together."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from threading import Event

import pytest

from reshard.threads import together


def test_each_thread_gives_its_part() -> None:
    assert together(lambda index, stopped: index * index, 3) == [0, 1, 4]


def test_an_exception_stops_the_others() -> None:
    ended, begun = [], threading.Barrier(3)

    def work(index: int, stopped: Event) -> None:
        begun.wait(30)
        if index == 1:
            raise ValueError("one")
        assert stopped.wait(30)
        ended.append(index)

    with pytest.raises(ValueError, match="one"):
        together(work, 3)
    assert sorted(ended) == [0, 2]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C as a shell's foreground job hears it; a background job begins with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("impatient", [False, True])
def test_ctrl_c_stops_all_and_waits_for_them(impatient: bool) -> None:
    """Also if it comes again while the threads end."""
    ended, begun = [], threading.Barrier(2)

    def work(index: int, stopped: Event) -> None:
        begun.wait(30)
        if index == 0:
            signal.raise_signal(signal.SIGINT)
        assert stopped.wait(30)
        time.sleep(0.1)
        if index == 0 and impatient:
            os.kill(os.getpid(), signal.SIGINT)  # which the main thread hears wherever it waits
        time.sleep(0.2)
        ended.append(index)

    with pytest.raises(KeyboardInterrupt):
        together(work, 2)
    assert sorted(ended) == [0, 1]


def test_ctrl_c_while_threads_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread runs, and the pool does not know it yet."""
    worked, started, start = [], [], threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        time.sleep(0.1)
        if len(started) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        together(lambda index, stopped: worked.append(index), 3)
    for thread in started:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert worked == []
