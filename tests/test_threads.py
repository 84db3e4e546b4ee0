"""Threads that start together, and end together if one of them fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest

import reshard as api
from reshard.transfer.threads import together


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
    """Ctrl-C as in a shell's foreground job; a background job starts with SIGINT ignored."""
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
    """The thread runs, but the pool does not know it yet."""
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


def limit(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Let the system start at most `threads` threads, like the limits of users and containers."""
    start, left = threading.Thread.start, [None] * threads

    def limited(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


@pytest.mark.parametrize("given", [0, 1, 3])
def test_fewer_threads_share_the_work(monkeypatch: pytest.MonkeyPatch, given: int) -> None:
    limit(monkeypatch, given)
    waiting, taken = deque(range(100)), []

    def work(index: int, stopped: Event) -> int:
        taken.extend(iter(lambda: waiting.popleft() if waiting else None, None))
        return index

    assert together(work, 8) == list(range(max(1, given)))
    assert sorted(taken) == list(range(100))


@pytest.mark.parametrize("given", [0, 1])
def test_whole_commands_with_fewer_threads(
    monkeypatch: pytest.MonkeyPatch, hf_model: Callable[..., Path], tmp_path: Path, given: int
) -> None:
    source = hf_model("qwen3", max_shard_size="200KB")
    limit(monkeypatch, given)
    api.convert(source, tmp_path / "out", to="megatron", workers=4)
    limit(monkeypatch, given)
    found = api.verify(source, tmp_path / "out")
    assert found.equal and found.tensors == len(api.open(source).tensors)


def test_a_user_who_may_start_no_threads() -> None:
    program = """
import os, resource
from reshard.transfer.threads import together
if os.geteuid() == 0:
    os.setuid(65534)  # limits do not hold for root
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
print(together(lambda index, stopped: index, 4))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[0]\n", "")
