"""A command's output on its way to the terminal: passed on byte by byte, kept in a log, and split into lines.

Each of stdout and stderr of the command is a pseudo-terminal if that of the guard is a terminal, else a pipe, and one
for both if both are the same file. Nothing else is between the command and the terminal: standard input, session,
process group and controlling terminal are those of the guard, so debuggers, password prompts, Ctrl-C and Ctrl-Z work
as they do without it. An interactive shell is different (`shell_terminal.py`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import re
import select
import termios
import time
import tty
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from reshard.runs.guard.supervise.line_sample import LineSample
from reshard.runs.guard.supervise.shell_terminal import ShellTerminal
from reshard.runs.guard.watch.watcher import OutputLine

MAX_LINE = 1 << 16
"""Bytes after which a line without an end is taken for a line."""
CHUNK_BYTES = 1 << 16
TRACEBACK = b"Traceback (most recent call last)"
MAX_TRACEBACKS = 4
"""Tracebacks whose place in the log is noted: the first failure may be far from the end of a long log."""
_RANK = re.compile(r"\[(?:rank|default)(\d+)\]:")
"""What torch and torchrun --tee put before the lines of a rank."""


@dataclass
class OutputStream:
    """One stream of the command. What is read from `source` is written to `target`, unless its reader is gone."""

    name: str
    source: int
    end: int
    """The command's end, which is closed here once the command has it."""
    target: int | None
    """Where it goes. None if it is only kept."""
    begun: bytes = b""
    """A line that has no end yet."""
    state: bytes = b""
    """The same since it was last redrawn."""
    seen: bytes = b""
    """The state when `settled` was last called."""
    told: bytes = b""
    """The state that it has returned."""
    at_start: bool = True
    """Whether the last byte that was passed on ended a line."""
    unwritten: bytes | memoryview = b""
    """What the target does not take yet. Until it does, no more is read, so that the command waits as well."""
    error: OSError | None = None
    """Why the target takes nothing more."""
    sample: LineSample = field(default_factory=LineSample)

    @property
    def awaited(self) -> tuple[int, int]:
        """A file descriptor, and the event of poll(2) after which the stream can go on."""
        if self.unwritten and self.target is not None:
            return self.target, select.POLLOUT
        return self.source, select.POLLIN

    @staticmethod
    def to(target: int, name: str) -> OutputStream:
        """A stream that is passed on to a file descriptor of this process."""
        is_terminal = os.isatty(target)
        source, end = pty.openpty() if is_terminal else os.pipe()
        stream = OutputStream(name, source, end, target)
        if is_terminal:
            tty.setraw(end)  # the terminal itself translates the ends of lines
            stream.resize()
        os.set_blocking(source, False)
        return stream

    def resize(self) -> bool:
        """Give the command's end the size of the terminal. Returns whether it had another one."""
        with suppress(OSError):
            size = fcntl.ioctl(2 if self.target is None else self.target, termios.TIOCGWINSZ, bytes(8))
            before = fcntl.ioctl(self.source, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(self.source, termios.TIOCSWINSZ, size)
            return size != before
        return False

    def read(self) -> bytes | None:
        """What the command has written since the last call; None at its end."""
        chunks: list[bytes] = []
        while sum(map(len, chunks)) < CHUNK_BYTES:  # a pseudo-terminal returns at most a page at once
            chunk = self._read_once()
            if not chunk:
                return b"".join(chunks) if chunks else chunk
            chunks.append(chunk)
        return b"".join(chunks)

    def _read_once(self) -> bytes | None:
        """The same, by one system call. A pseudo-terminal ends with EIO."""
        try:
            return os.read(self.source, CHUNK_BYTES) or None
        except BlockingIOError:
            return b""
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return None

    def pass_on(self, content: bytes = b"") -> bool:
        """Write to the target, as much as it takes now. Returns false once it takes no more at all."""
        if self.target is None:
            return True
        if content:
            self.at_start = content.endswith(b"\n")
            self.unwritten = memoryview(content)
        try:
            while self.unwritten and _is_writable(self.target):
                self.unwritten = self.unwritten[os.write(self.target, self.unwritten[: select.PIPE_BUF]) :]
        except BlockingIOError:  # another program has made the target non-blocking
            return True
        except OSError as error:
            self.error = error
        return self.error is None

    def close(self) -> None:
        """Close the guard's end. A command that still writes sees a closed pipe."""
        os.close(self.source)


@dataclass
class OutputRelay:
    """The output of a command. `log` gets whole lines in the format of container logs: time, stream, F, text."""

    log: Path
    streams: list[OutputStream]
    _file: int
    tracebacks: list[int] = field(default_factory=list)
    """Where the first tracebacks are in the log, in bytes; of those that came at once, the first."""
    terminal: ShellTerminal | None = None
    """That of a command which is an interactive shell."""

    @staticmethod
    def of(log: Path, *, stdout: int = 1, terminal: ShellTerminal | None = None) -> OutputRelay:
        """A relay of the command's stdout to `stdout`, and of its stderr to that of this process."""
        if terminal:
            os.set_blocking(terminal.source, False)
            stream = OutputStream("stdout", terminal.source, terminal.end, stdout)
            stream.resize()
            return OutputRelay(log, [stream], _appended(log), terminal=terminal)
        streams = [OutputStream.to(stdout, "stdout")]
        if not os.path.samestat(os.fstat(stdout), os.fstat(2)):
            streams.append(OutputStream.to(2, "stderr"))
        return OutputRelay(log, streams, _appended(log))

    @staticmethod
    def kept(log: Path, source: int) -> OutputRelay:
        """A relay of one pipe to nothing but the log."""
        os.set_blocking(source, False)
        return OutputRelay(log, [OutputStream("stdout", source, -1, None)], _appended(log))

    @property
    def at_start(self) -> bool:
        """Whether text that is printed on stderr now begins a line."""
        return all(each.at_start for each in self.streams)

    @property
    def ends(self) -> tuple[int, int]:
        """The descriptors that the command gets as stdout and stderr."""
        return self.streams[0].end, self.streams[-1].end

    def begun(self) -> None:
        """Close the command's ends here, once it has them."""
        for stream in self.streams:
            os.close(stream.end)

    @property
    def is_blocked(self) -> bool:
        """Whether output waits for its reader."""
        return any(each.unwritten for each in self.streams)

    def resize(self) -> bool:
        """Give the command's ends the size of the terminal. Returns whether one had another."""
        return True in [stream.resize() for stream in self.streams]

    def move(self, stream: OutputStream) -> list[OutputLine]:
        """Pass on what there is. Returns the lines in it, and removes the stream at its end."""
        content = b"" if stream.unwritten else stream.read()
        if content is not None and stream.pass_on(content):
            return self._lines(stream, content) if content else []
        self.streams.remove(stream)
        last = self._lines(stream, b"\n" if stream.begun else b"")
        return last + _output_lines(stream, time.time(), stream.sample.waiting())

    def settled(self) -> list[OutputLine]:
        """Lines of a flood that have waited, and those without an end, such as progress bars, each once if they have
        not changed since the last call."""
        now = time.time()
        lines: list[OutputLine] = []
        for stream in self.streams:
            lines += _output_lines(stream, now, stream.sample.waiting(time.monotonic()))
            if stream.state == stream.seen != stream.told:
                lines += _output_lines(stream, now, [stream.state])
                stream.told = stream.state
            stream.seen = stream.state
        return lines

    def close(self) -> None:
        """Close what is open."""
        for stream in self.streams:
            stream.close()
        os.close(self._file)

    def _lines(self, stream: OutputStream, content: bytes) -> list[OutputLine]:
        """The lines that end in `content`."""
        now = time.time()
        *whole, stream.begun = (stream.begun + content).split(b"\n")
        if len(stream.begun) > MAX_LINE:
            whole, stream.begun = [*whole, stream.begun], b""
        self._keep(stream, now, whole)
        *states, stream.state = (stream.state[-MAX_LINE:] + content).replace(b"\r", b"\n").split(b"\n")
        states = states[1:] if states[:1] == [stream.told] else states
        stream.told = b""
        return _output_lines(stream, now, stream.sample.chosen(time.monotonic(), states))

    def _keep(self, stream: OutputStream, now: float, whole: list[bytes]) -> None:
        """Write lines to the log. Of a line that redraws itself, it keeps the last state."""
        if not whole:
            return
        text = b"\n".join(whole)
        if b"\r" in text:
            text = b"\n".join(line.rstrip(b"\r").rpartition(b"\r")[2] for line in whole)
        when = datetime.fromtimestamp(now, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
        start = f"{when}Z {stream.name} F ".encode()
        content = start + text.replace(b"\n", b"\n" + start) + b"\n"
        self._note_traceback(content)
        with suppress(OSError):  # a full disk is the command's to report
            os.write(self._file, content)

    def _note_traceback(self, content: bytes) -> None:
        """Note where a traceback will be, if there is one in what comes next in the log."""
        if len(self.tracebacks) < MAX_TRACEBACKS:
            place = content.find(TRACEBACK)
            if place >= 0:
                self.tracebacks.append(os.fstat(self._file).st_size + place)


def _is_writable(target: int) -> bool:
    """Whether it takes PIPE_BUF bytes without waiting, by pipe(7)."""
    poll = select.poll()
    poll.register(target, select.POLLOUT)
    return bool(poll.poll(0))


def _appended(log: Path) -> int:
    return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+Z (?:stdout|stderr) F ", re.MULTILINE)


def without_times(log: str) -> str:
    """The text of a log without the times and streams before its lines."""
    return _STAMP.sub("", log)


def _output_lines(stream: OutputStream, now: float, lines: Iterable[bytes]) -> list[OutputLine]:
    return [_line(stream.name, now, line) for line in lines if line.strip()]


def _line(stream: str, now: float, content: bytes) -> OutputLine:
    text = content.decode("utf-8", "replace")
    rank = _RANK.match(text)
    return OutputLine(now, stream, text, int(rank[1]) if rank else None)
