"""A terminal for an interactive shell under guard.

A shell moves its jobs between foreground and background by means of its controlling terminal, which must be that of its
output, too (bash uses stderr). As the output goes through a pseudo-terminal, that becomes the shell's controlling
terminal, in a session of its own. What is typed is passed on to it; it makes signals of Ctrl-C and Ctrl-Z, and has the
modes that the shell and its jobs set. The terminal of the guard is raw meanwhile.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import termios
import tty
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from reshard.runs.guard.watch.process_tree import SHELL_NAMES

_KEYS = 0
"""Standard input of the guard."""
_BYTES = 1024
_WITH_FILE = ("--rcfile", "--init-file")


def is_interactive_shell(words: Sequence[str]) -> bool:
    """Whether a command is a shell that reads commands from the terminal: with -i, or without a script or -c."""
    if Path(words[0]).name.lstrip("-") not in SHELL_NAMES:
        return False
    left = iter(words[1:])
    for word in left:
        if word in _WITH_FILE:
            next(left, None)
        elif not word.startswith(("-", "+")):
            return False
        elif not word.startswith("--") and ("i" in word or "c" in word):
            return "i" in word
    return True


class ShellTerminal:
    """The pseudo-terminal of a shell: `end` is the shell's, `source` the guard's. A context in which keys reach it."""

    def __init__(self) -> None:
        self._modes = termios.tcgetattr(_KEYS)
        self.source, self.end = pty.openpty()
        termios.tcsetattr(self.end, termios.TCSANOW, self._modes)
        self._into = os.dup(self.source)
        self._keys = b""
        self.is_raw = False
        """Whether a line that is printed has to end with a carriage return."""

    @staticmethod
    def of(words: Sequence[str], outputs: Sequence[int]) -> ShellTerminal | None:
        """That of a command, if it is an interactive shell with its input and all `outputs` on the terminal."""
        with suppress(OSError):
            terminal = os.fstat(_KEYS)
            is_same = all(os.path.samestat(os.fstat(each), terminal) for each in outputs)
            if is_same and os.tcgetpgrp(_KEYS) == os.getpgrp() and is_interactive_shell(words):
                return ShellTerminal()
        return None

    def control(self) -> None:
        """In the process of the shell, which has this terminal as standard input: make it the controlling one."""
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def __enter__(self) -> ShellTerminal:
        tty.setraw(_KEYS, termios.TCSADRAIN)
        self.is_raw = True
        return self

    @property
    def awaited(self) -> tuple[int, int]:
        """A file descriptor, and the event of poll(2) after which `move` can go on."""
        return (self._into, select.POLLOUT) if self._keys else (_KEYS, select.POLLIN)

    def move(self) -> None:
        """Pass on what was typed, as much as the shell's terminal takes."""
        with suppress(OSError):  # the shell, or the terminal, is gone
            self._keys = self._keys or os.read(_KEYS, _BYTES)
            self._keys = self._keys[os.write(self._into, self._keys) :]

    def stderr(self) -> io.TextIOWrapper:
        """The standard error of the guard, with the ends of lines that the terminal needs now."""
        return open(2, "w", newline="\r\n", closefd=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_raw = False
        os.close(self._into)
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(_KEYS, termios.TCSADRAIN, self._modes)
