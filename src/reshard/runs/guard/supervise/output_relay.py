"""A command's output on its way to the terminal: passed on byte by byte, kept in a log, and split into lines.

Each of stdout and stderr of the command is a pseudo-terminal if that of the guard is a terminal, else a pipe, and one
for both if both are the same file. Nothing else is between the command and the terminal: standard input, session,
process group and controlling terminal are those of the guard, so debuggers, password prompts, Ctrl-C and Ctrl-Z work
as they do without it.
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
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from reshard.runs.guard.supervise.line_sample import LineSample, PrintedLine
from reshard.runs.guard.supervise.shell_terminal import ShellTerminal
from reshard.runs.guard.watch.watcher import OutputLine

MAX_LINE = 1 << 16
"""Bytes after which a line without an end is taken for a line."""
CHUNK_BYTES = 1 << 16
_RANK = re.compile(r"\[(?:rank|default)(\d+)\]:")
"""What torch and torchrun --tee put before the lines of a rank."""


@dataclass
class OutputStream:
    """One stream of the command. What is read from `source` is written to `target`, unless its reader is gone."""

    name: str
    source: int
    end: int
    """The command's end, which is closed here once the command has it."""
    target: int
    begun: bytes = b""
    """A line that has no end yet."""
    seen: bytes = b""
    """The state of this line at the last look."""
    read_state: bytes = b""
    """The state that watchers have read."""
    at_start: bool = True
    """Whether the last byte that was passed on ended a line."""
    unwritten: bytes | memoryview = b""
    """What the target does not take yet. Until it does, no more is read, so that the command waits as well."""
    error: OSError | None = None
    """Why the target takes nothing more."""

    @property
    def state(self) -> bytes:
        """What is left of the line without an end since it was last redrawn."""
        return self.begun.rpartition(b"\r")[2]

    @property
    def awaited(self) -> tuple[int, int]:
        """A file descriptor, and the event of poll(2) after which the stream can go on."""
        return (self.target, select.POLLOUT) if self.unwritten else (self.source, select.POLLIN)

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
            size = fcntl.ioctl(self.target, termios.TIOCGWINSZ, bytes(8))
            before = fcntl.ioctl(self.source, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(self.source, termios.TIOCSWINSZ, size)
            return size != before
        return False

    def read(self) -> bytes | None:
        """What the command has written; None at its end, which is EIO for a pseudo-terminal."""
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
    _sample: LineSample = field(default_factory=LineSample)
    terminal: ShellTerminal | None = None
    """That of a command which is an interactive shell."""

    @staticmethod
    def of(log: Path, *, stdout: int = 1, terminal: ShellTerminal | None = None) -> OutputRelay:
        """A relay of the command's stdout to `stdout`, and of its stderr to that of this process."""
        if terminal:
            os.set_blocking(terminal.source, False)
            streams = [OutputStream("stdout", terminal.source, terminal.end, stdout)]
            streams[0].resize()
        else:
            streams = [OutputStream.to(stdout, "stdout")]
            if not os.path.samestat(os.fstat(stdout), os.fstat(2)):
                streams.append(OutputStream.to(2, "stderr"))
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        return OutputRelay(log, streams, file, terminal=terminal)

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

    def move(self, stream: OutputStream) -> None:
        """Pass on what there is. Removes the stream at its end."""
        content = b"" if stream.unwritten else stream.read()
        if content is not None and stream.pass_on(content):
            self._split(stream, content)
        else:
            self.streams.remove(stream)
            self._split(stream, b"\n" if stream.begun else b"")

    def lines(self) -> list[OutputLine]:
        """The lines since the last call; one without an end, such as a progress bar, once it has not changed since."""
        now = time.time()
        for stream in self.streams:
            if stream.state == stream.seen != stream.read_state:
                self._sample.add(now, [stream.state])
                stream.read_state = stream.state
            stream.seen = stream.state
        return list(map(_output_line, self._sample.taken()))

    def close(self) -> None:
        """Close what is open."""
        for stream in self.streams:
            stream.close()
        os.close(self._file)

    def _split(self, stream: OutputStream, content: bytes) -> None:
        """Keep the lines that end in `content`. Each state of a line that redraws itself is one for watchers."""
        if not content:
            return
        now = time.time()
        *states, _ = (stream.state + content).replace(b"\r", b"\n").split(b"\n")
        self._sample.add(now, states[1:] if states[:1] == [stream.read_state] else states)
        stream.read_state = b""
        *whole, stream.begun = (stream.begun + content).split(b"\n")
        if len(stream.begun) > MAX_LINE:
            whole, stream.begun = [*whole, stream.begun], b""
        self._keep(stream, now, whole)

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
        with suppress(OSError):  # a full disk is the command's to report
            os.write(self._file, content)


def _is_writable(target: int) -> bool:
    """Whether it takes PIPE_BUF bytes without waiting, by pipe(7)."""
    poll = select.poll()
    poll.register(target, select.POLLOUT)
    return bool(poll.poll(0))


_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+Z (?:stdout|stderr) F ", re.MULTILINE)


def without_times(log: str) -> str:
    """The text of a log without the times and streams before its lines."""
    return _STAMP.sub("", log)


def _output_line(line: PrintedLine) -> OutputLine:
    text = line.text.decode("utf-8", "replace")
    rank = _RANK.match(text)
    return OutputLine(line.time, text, int(rank[1]) if rank else None)
