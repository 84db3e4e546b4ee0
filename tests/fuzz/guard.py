"""Limits for every input: no code runs, no other file changes, and time and memory are bounded."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECONDS = 20.0
"""Processor time for one input. An honest one takes some milliseconds, ten times as much when instrumented."""
MEMORY = 1 << 30
"""Bytes by which the address space of the process may grow."""

_NEVER = (
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.kill", "pty.spawn"),
    *("subprocess.Popen", "socket.", "ctypes.dlopen", "urllib.Request", "webbrowser.open"),
)
_CHANGES = {
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.utime"), 1),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink"), 2),
}
"""Python's audit events that change files, and the number of their arguments that are paths."""


class Forbidden(BaseException):
    """Code under test did something forbidden. No exception handler in the code under test catches this."""


_folder: str | None = None
"""Folders where files may change during an input. An audit hook cannot be removed, so there is only one."""
_installed = False


@contextmanager
def watching(folder: Path) -> Iterator[None]:
    """Raise Forbidden, or MemoryError, for anything forbidden in the block; it may change files below `folder`."""
    global _folder, _installed
    if not _installed:
        sys.addaudithook(_audit)
        _installed = True
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGVTALRM, _late)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, limit[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    _folder = str(folder)
    try:
        yield
    finally:
        _folder = None
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, limit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _folder and _is_forbidden(event, args):
        raise Forbidden(f"{event} {args!r:.200}")


def _late(number: int, frame: Any) -> None:
    raise Forbidden(f"more than {SECONDS:.0f} s of processor time")


def _is_forbidden(event: str, args: tuple[Any, ...]) -> bool:
    if event.startswith(_NEVER):
        return True
    if event == "code.__new__":  # Jinja makes its tracebacks of it
        return not _within("jinja2/debug.py")
    if event == "exec":  # imports run code of files, namedtuple a string; what runs a string is eval and exec
        return args[0].co_filename == "<string>" and not _within("<frozen importlib")
    if event == "open":
        changes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
        return isinstance(args[2], int) and bool(args[2] & changes) and _is_elsewhere(args[0])
    paths = args[: _CHANGES.get(event, 0)]
    below = args[-1] if paths and isinstance(args[-1], int) and args[-1] >= 0 else None
    return any(_is_elsewhere(path, below) for path in paths)


def _is_elsewhere(path: Any, below: int | None = None) -> bool:
    if not isinstance(path, (str, bytes, os.PathLike)):
        return False
    folder = "" if below is None else os.readlink(f"/proc/self/fd/{below}")  # noqa: PTH115
    full = os.path.abspath(os.path.join(folder, os.fsdecode(path)))  # noqa: PTH100, PTH118
    return not full.startswith((str(_folder), os.devnull))


def _within(file: str) -> bool:
    """Whether code of this file is in the call stack."""
    frame = sys._getframe()
    while frame.f_back:
        frame = frame.f_back
        if file in frame.f_code.co_filename:
            return True
    return False
