"""Run a command until it ends: pass on its output and its signals, and let watchers look at both."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError
from reshard.runs.guard.supervise.child_processes import end_with_parent
from reshard.runs.guard.supervise.output_relay import OutputRelay, OutputStream
from reshard.runs.guard.supervise.signal_passing import PassedSignals
from reshard.runs.guard.supervise.start_signals import ignored_at_start
from reshard.runs.guard.watch.process_tree import Processes, ProcessTree
from reshard.runs.guard.watch.watcher import Notice, Watcher

TICK_SECONDS = 1.0
"""Seconds between two looks at the processes."""
LAST_OUTPUT_SECONDS = 0.1
"""Seconds for output that is still on its way when the command has ended."""
TERM_SECONDS = 40.0
"""Seconds that a command gets to end after SIGTERM; torchrun gives its ranks 30 of them."""


@dataclass
class CommandOutcome:
    """How a command ended."""

    status: int = 0
    """As in a shell: its exit status, or 128 plus the signal that ended it."""
    signal: int = 0
    """The first signal that the guard received, and the command with it; 0 if none."""
    began: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    seconds: float = 0.0
    notices: list[Notice] = field(default_factory=list)
    left: tuple[int, ...] = ()
    """Ranks that are still alive, by process id."""

    @property
    def stopped(self) -> Notice | None:
        """Why the guard ended the run; None if it did not."""
        return next((each for each in self.notices if each.stop), None)

    @property
    def failed(self) -> bool:
        """Whether it did not end well."""
        return bool(self.status or self.stopped)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "status": self.status,
            "signal": self.signal,
            "seconds": self.seconds,
            "notices": [each.problem.as_dict() for each in self.notices],
            "left": list(self.left),
        }


def supervise(
    start: Callable[[], subprocess.Popen[bytes]],
    relay: OutputRelay,
    watchers: Sequence[Watcher],
    say: Callable[[Notice], None],
) -> CommandOutcome:
    """Run a command to its end. `say` prints what watchers have to say."""
    with PassedSignals(apart=relay.terminal is not None) as signals, relay.terminal or nullcontext():
        began = time.monotonic()
        outcome = _Supervision(start(), relay, signals, watchers, say).follow()
    outcome.seconds = time.monotonic() - began
    return outcome


def starter(
    words: Sequence[str], environment: Mapping[str, str], folder: Path, relay: OutputRelay
) -> Callable[[], subprocess.Popen[bytes]]:
    """A function that starts a command which ends with this process, with its output in a relay.

    The command ignores the signals that are ignored now, as if its shell had started it. The function raises
    ReshardError if the command cannot be started.
    """
    out, err = relay.ends
    parent, ignored, terminal = os.getpid(), ignored_at_start(), relay.terminal

    def prepare() -> None:
        """In the command's process, before its program."""
        end_with_parent(signal.SIGTERM, parent)
        if terminal:
            terminal.control()
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    def start() -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(
                words,
                env=environment,
                cwd=folder,
                stdin=terminal.end if terminal else None,
                stdout=out,
                stderr=err,
                close_fds=False,  # a shell's <(…) is a descriptor
                preexec_fn=prepare,
                start_new_session=terminal is not None,
            )
        except OSError as error:
            raise ReshardError(
                "command-not-started",
                "the command cannot be started",
                found=f"{error.filename or words[0]}: {error.strerror}",
                remedy="check its name, and that it is on PATH and executable",
            ) from error
        relay.begun()
        return process

    return start


def _not_passed_on(stream: str, error: OSError) -> Problem:
    return Problem(
        "output-closed",
        f"the command could no longer write to {stream}",
        found=error.strerror,
        remedy="let the program that reads the output run to its end, or write to a file on a disk with free space",
    )


@dataclass
class _Supervision:
    """A command while it runs."""

    process: subprocess.Popen[bytes]
    relay: OutputRelay
    signals: PassedSignals
    watchers: Sequence[Watcher]
    say: Callable[[Notice], None]
    outcome: CommandOutcome = field(default_factory=CommandOutcome)
    processes: Processes = field(default_factory=dict)
    deadline: float | None = None
    """When a command that got SIGTERM is killed, by the monotonic clock."""
    lost: bool = False
    """Whether output was lost that somebody still wanted: alone, the command could not have ended well."""

    def __post_init__(self) -> None:
        self.tree = ProcessTree(self.process.pid)

    def follow(self) -> CommandOutcome:
        due = time.monotonic() + TICK_SECONDS
        while self.process.poll() is None:
            self._wait(due - time.monotonic())
            if time.monotonic() >= due:
                self._tick()
                due = time.monotonic() + TICK_SECONDS
        if self.outcome.stopped:
            # What outlives a launcher that the guard has ended: those of DeepSpeed and LLaMA-Factory do not wait.
            self._send(signal.SIGTERM)
            while any(map(self.tree.lives, self.processes)) and time.monotonic() < (self.deadline or 0):
                self._wait(LAST_OUTPUT_SECONDS)
            self._send(signal.SIGKILL)
        self._drain()
        self._read_lines()
        code = self.process.returncode
        self.outcome.status = (code if code >= 0 else 128 - code) or int(self.lost)
        self.outcome.signal = self.signals.first
        self.outcome.left = tuple(
            pid for pid, each in self.processes.items() if each.rank is not None and self.tree.lives(pid)
        )
        return self.outcome

    def _wait(self, seconds: float) -> None:
        """Until something happens, at most this long."""
        streams = {stream.awaited[0]: stream for stream in self.relay.streams}
        poll = select.poll()
        poll.register(self.signals.descriptor, select.POLLIN)
        for stream in streams.values():
            poll.register(*stream.awaited)
        keys = self.relay.terminal
        if keys:
            poll.register(*keys.awaited)
        for descriptor, _ in poll.poll(1000 * max(seconds, 0)):
            if descriptor in streams:
                self._move(streams[descriptor])
            elif keys and descriptor == keys.awaited[0]:
                keys.move()
            else:
                self._receive_signals()

    def _move(self, stream: OutputStream) -> None:
        self.relay.move(stream)
        if stream not in self.relay.streams:
            stream.close()
            if stream.error:
                self.lost = self.lost or stream.error.errno != errno.EPIPE
                self.outcome.notices.append(Notice(_not_passed_on(stream.name, stream.error)))

    def _read_lines(self) -> None:
        for line in self.relay.lines():
            for watcher in self.watchers:
                self._report(watcher.line(line))

    def _receive_signals(self) -> None:
        for number in self.signals.come():
            resized = number == signal.SIGWINCH and self.relay.resize()
            if resized and self.relay.terminal:
                continue  # the kernel sends it to those whose terminal that is
            if self.signals.to_pass(number):
                self.process.send_signal(number)
            elif resized:  # the command may have asked for its size before that
                os.killpg(0, number)

    def _tick(self) -> None:
        self._read_lines()
        processes = self.tree.snapshot()
        if self.process.poll() is not None:
            return  # what it has left behind is no longer below it: the snapshot before shows more
        self.processes = processes
        for watcher in self.watchers:
            self._report(watcher.tick(time.time(), self.processes))
        if self.deadline is not None and time.monotonic() > self.deadline:
            self._send(signal.SIGKILL)

    def _report(self, notices: Iterable[Notice]) -> None:
        for notice in notices:
            self.outcome.notices.append(notice)
            self.say(notice)
            if notice.stop and self.deadline is None:
                self.deadline = time.monotonic() + TERM_SECONDS
                # An interactive shell ignores SIGTERM.
                self.process.send_signal(signal.SIGHUP if self.relay.terminal else signal.SIGTERM)

    def _send(self, number: int) -> None:
        for pid in filter(self.tree.lives, self.processes):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _drain(self) -> None:
        """Pass on what is left. If other processes still write, a copy of this one goes on to pass it on."""
        deadline = time.monotonic() + LAST_OUTPUT_SECONDS
        while self.relay.streams and time.monotonic() < deadline:
            self._wait(LAST_OUTPUT_SECONDS)
            if self.relay.is_blocked and not self.signals.first:
                deadline = time.monotonic() + LAST_OUTPUT_SECONDS
        if self.relay.streams and not os.fork():
            self.signals.restore()
            self.relay.terminal = None
            while self.relay.streams:
                self._wait(TICK_SECONDS)
            os._exit(0)
        self.relay.close()
