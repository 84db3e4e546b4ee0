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
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from reshard.guard.watch.watcher import OutputLine

MAX_LINE = 1 << 16
"""Bytes after which a line without an end is taken for a line."""
CHUNK_BYTES = 1 << 16
LAST_LINES = 32
"""Lines of a chunk that are looked at, besides those with a loss: to look at each would slow a command that prints
megabytes in a second."""
_RANK = re.compile(r"\[(?:rank|default)(\d+)\]:")
"""What torch and torchrun --tee put before the lines of a rank."""
_ENDS = re.compile(rb"[\r\n]")


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

    def resize(self) -> None:
        """Give the command's end the size of the terminal."""
        with suppress(OSError):
            size = fcntl.ioctl(2 if self.target is None else self.target, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(self.source, termios.TIOCSWINSZ, size)

    def read(self) -> bytes | None:
        """What the command has written since the last call; None at its end. A pseudo-terminal ends with EIO."""
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

    @staticmethod
    def of(log: Path, *, stdout: int = 1) -> OutputRelay:
        """A relay of the command's stdout to `stdout`, and of its stderr to that of this process."""
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

    def move(self, stream: OutputStream) -> list[OutputLine]:
        """Pass on what there is. Returns the lines in it, and removes the stream at its end."""
        content = b"" if stream.unwritten else stream.read()
        if content is not None and stream.pass_on(content):
            return self._lines(stream, content) if content else []
        self.streams.remove(stream)
        return self._lines(stream, b"\n" if stream.begun else b"")

    def settled(self) -> list[OutputLine]:
        """Lines without an end, such as progress bars, that have not changed since the last call; each once."""
        settled = [stream for stream in self.streams if stream.state == stream.seen != stream.told]
        for stream in self.streams:
            stream.seen = stream.state
        for stream in settled:
            stream.told = stream.state
        return [_line(each.name, time.time(), each.state) for each in settled if each.state.strip()]

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
        *states, stream.state = _ENDS.split(stream.state[-MAX_LINE:] + content)
        states = states[1:] if states[:1] == [stream.told] else states
        stream.told = b""
        flood = (state for state in states[:-LAST_LINES] if b"loss" in state)
        return [_line(stream.name, now, state) for state in (*flood, *states[-LAST_LINES:]) if state.strip()]

    def _keep(self, stream: OutputStream, now: float, whole: list[bytes]) -> None:
        """Write lines to the log. Of a line that redraws itself, it keeps the last state."""
        when = datetime.fromtimestamp(now, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
        start = f"{when}Z {stream.name} F ".encode()
        lines = (start + line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n" for line in whole)
        with suppress(OSError):  # a full disk is the command's to report
            os.write(self._file, b"".join(lines))


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


def _line(stream: str, now: float, content: bytes) -> OutputLine:
    text = content.decode("utf-8", "replace")
    rank = _RANK.match(text)
    return OutputLine(now, stream, text, int(rank[1]) if rank else None)
