"""The signals that were ignored when this process was started, and that a command ignores as well.

Python itself ignores SIGPIPE and SIGXFSZ before it runs any code. For these two, the parent is looked at: a shell and
systemd pass on what they ignore themselves. Other programs that ignore them, such as Python and sshd, restore the
default for what they start.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from reshard.runs.guard.watch.process_tree import SHELL_NAMES

_IGNORED_BY_PYTHON = {getattr(signal, name) for name in ("SIGPIPE", "SIGXFSZ") if hasattr(signal, name)}
_PASSES_ON = (*SHELL_NAMES, "busybox", "fish", "systemd")


def ignored_at_start() -> set[int]:
    """The numbers of these signals."""
    ignored = {each for each in signal.valid_signals() if signal.getsignal(each) is signal.SIG_IGN}
    return (ignored - _IGNORED_BY_PYTHON) | (_IGNORED_BY_PYTHON & set(_ignored_by_parent()))


def _ignored_by_parent() -> Iterator[int]:
    parent = Path(f"/proc/{os.getppid()}")
    with suppress(OSError, StopIteration):
        if _program(parent) in _PASSES_ON:
            lines = (parent / "status").read_text(errors="replace").splitlines()
            mask = int(next(line for line in lines if line.startswith("SigIgn:")).split()[1], 16)
            yield from (number for number in _IGNORED_BY_PYTHON if mask >> (number - 1) & 1)


def _program(process: Path) -> str:
    """The name of a process's program; of another user's, what it calls itself."""
    with suppress(OSError):
        return (process / "exe").readlink().name
    return (process / "comm").read_text(errors="replace").strip()
