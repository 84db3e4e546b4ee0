"""A command that prints very much: what is kept of it, and what watchers and the report read. Work is counted."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reshard.runs.guard.end import log_parts
from reshard.runs.guard.end.failure import RunEvidence, read_failure
from reshard.runs.guard.supervise.line_sample import LAST_LINES, LOSS_LINES, LineSample
from reshard.runs.guard.supervise.supervision import starter, supervise
from reshard.runs.guard.watch.watcher import Notice, OutputLine, Watcher
from tests.guard.test_terminal import relay_of

TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "/home/user/train.py", line 7, in <module>\n    scale(3)\n'
    '  File "/home/user/train.py", line 3, in scale\n    return table[number]\n'
    "KeyError: 3\n"
)
FLOOD = "".join(f"record {number} of the data, which nobody reads\n" for number in range(60_000))


class Piped:
    """A relay to nothing but a log."""

    def __init__(self, log: Path) -> None:
        self.relay = relay_of(log)
        self._into, _ = self.relay.ends

    def print(self, content: bytes) -> None:
        for begin in range(0, len(content), 1 << 15):
            os.write(self._into, content[begin : begin + (1 << 15)])
            self.relay.move(self.relay.streams[0])

    def lines(self) -> list[str]:
        """The lines that watchers read."""
        return [line.text for line in self.relay.lines()]


@pytest.fixture
def piped(tmp_path: Path) -> Iterator[Piped]:
    piped = Piped(tmp_path / "log")
    yield piped
    piped.relay.begun()
    piped.relay.close()


def test_of_a_flood_the_last_lines_are_read_and_all_are_kept(piped: Piped, tmp_path: Path) -> None:
    piped.print(FLOOD.encode())
    assert piped.lines() == FLOOD.splitlines()[-LAST_LINES:]
    kept = (tmp_path / "log").read_text().splitlines()
    assert [line.split(" F ", 1)[1] for line in kept] == FLOOD.splitlines()


def test_a_loss_in_a_flood_is_read(piped: Piped) -> None:
    flood = FLOOD.encode()
    half = flood.index(b"\n", len(flood) // 2) + 1
    piped.print(flood[:half] + b"step 7/10 loss nan\n" + flood[half:])
    assert piped.lines() == ["step 7/10 loss nan", *FLOOD.splitlines()[-LAST_LINES:]]


def test_after_a_flood_every_line_is_read(piped: Piped) -> None:
    piped.print(FLOOD.encode())
    piped.lines()
    lines = [f"step {number}/99 loss nan" for number in range(1, 4)]
    piped.print("".join(f"{line}\n" for line in lines).encode())
    assert piped.lines() == lines


@pytest.mark.parametrize("size", [1, 200, 5000])
@pytest.mark.parametrize("word", ["loss", "record"])
def test_lines_of_a_flood_are_read_once_and_in_order(word: str, size: int) -> None:
    sample, lines = LineSample(), [f"{word} {number}".encode() for number in range(5000)]
    for begin in range(0, len(lines), size):
        sample.add(0.0, lines[begin : begin + size])
    count = LAST_LINES + (LOSS_LINES if word == "loss" else 0)
    assert [line.text for line in sample.taken()] == lines[-count:] and sample.taken() == []


def test_a_watcher_sees_a_loss_that_ends_a_flood(tmp_path: Path) -> None:
    class Counts(Watcher):
        seen = 0
        last = ""

        def line(self, line: OutputLine) -> Iterator[Notice]:
            self.seen, self.last = self.seen + 1, line.text
            yield from ()

    code = "print('step 1/3 loss 2.5\\n' * 200_000 + 'step 2/3 loss nan')"
    relay, watcher = relay_of(tmp_path / "log"), Counts()
    start = starter((sys.executable, "-c", code), os.environ, tmp_path, relay)
    outcome = supervise(start, relay, [watcher], print)
    assert watcher.last == "step 2/3 loss nan"
    assert watcher.seen <= (LAST_LINES + LOSS_LINES) * (outcome.seconds + 2)


def test_the_first_traceback_of_a_long_log_is_the_failure(piped: Piped, tmp_path: Path) -> None:
    piped.print((FLOOD + TRACEBACK + FLOOD + TRACEBACK.replace("KeyError: 3", "EOFError")).encode())
    piped.print(FLOOD.encode())
    log = tmp_path / "log"
    assert len(log_parts.read_parts(log)) < log.stat().st_size / 2
    assert read_failure(log, RunEvidence(status=1)).shown[-1].startswith("KeyError: 3")


def test_few_tracebacks_of_a_log_are_read(piped: Piped, tmp_path: Path) -> None:
    for number in range(log_parts.MAX_TRACEBACKS + 2):
        piped.print(f"attempt {number}\n{TRACEBACK}{FLOOD}".encode())
    piped.print(FLOOD.encode())
    assert log_parts.read_parts(tmp_path / "log").count(TRACEBACK.splitlines()[0]) == log_parts.MAX_TRACEBACKS


def test_of_a_log_of_a_hundred_megabytes_a_megabyte_is_kept(tmp_path: Path) -> None:
    log, flood = tmp_path / "log", FLOOD.encode() * 20
    log.write_bytes(b"the command\n" + flood + TRACEBACK.encode() + flood + b"the last words\n")
    text = log_parts.read_parts(log)
    assert log.stat().st_size > 100_000_000 and len(text) < 1 << 20
    assert text.startswith("the command\n") and text.endswith("the last words\n")
    assert "\nKeyError: 3\n" in text


def test_a_short_log_is_read_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for count in (0, 5, log_parts.HEAD_LINES, log_parts.HEAD_LINES + log_parts.TAIL_LINES):
        log.write_bytes(b"x\n" * count)
        assert log_parts.read_parts(log) == "x\n" * count
