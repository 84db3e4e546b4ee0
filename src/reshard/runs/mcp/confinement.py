"""What a tool may do: read files below the folders of the server, and nothing else.

Paths that a client names are checked first. Links, and names in indexes and configs, lead to other files later: so the
process of a call checks, by Python's audit events, each file that any module opens, and each folder that it lists. The
packages and what the system tells (/proc, /sys) are readable besides.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Any

from reshard.base.errors import ReshardError, listed

READING_EVENTS = ("open", "os.listdir", "os.scandir")
REFUSED_EVENTS = (
    *("os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.setxattr"),
    *("os.symlink", "os.truncate", "os.utime", "os.exec", "os.fork", "os.posix_spawn", "os.system"),
    *("subprocess.Popen", "socket.bind", "socket.connect", "socket.getaddrinfo"),
    *("socket.sendto", "socket.sendmsg"),
)
"""Events of all else that a tool could do: writing, starting programs, connecting to others."""
WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def located(named: str, folders: Sequence[str]) -> str:
    """The real path of what a client named. Raises ReshardError if it is not below `folders`."""
    is_path = "://" not in named and "\0" not in named
    real = os.path.realpath(os.path.join(folders[0], named)) if is_path else named  # noqa: PTH118
    if not _is_below(real, folders):
        raise _outside(named, real, folders)
    return real


def confine(folders: Sequence[str], packages: Sequence[str]) -> list[ReshardError]:
    """Refuse this process everything but reading below `folders`. It cannot be undone.

    Returns the list to which paths elsewhere are added when they are refused: who reads may take that for damage.
    """
    refused: list[ReshardError] = []
    own = [sys.prefix, sys.base_prefix, *filter(None, packages), "/proc", "/sys", os.devnull]
    besides = [*folders, *own, *map(os.path.realpath, own)]

    def check_event(event: str, arguments: tuple[Any, ...]) -> None:
        first = arguments[0] if arguments else None
        if event in REFUSED_EVENTS or (
            event == "open" and arguments[2] & WRITING_FLAGS and first != os.devnull
        ):
            raise PermissionError(errno.EPERM, f"tools only read: {event}")
        if event == "import" and first == "tensorstore":
            raise ReshardError(
                "orbax-not-confined",
                "tools do not read Orbax checkpoints, because tensorstore opens files without an event",
                remedy="run the command in a shell",
            )
        if event in READING_EVENTS and isinstance(
            first, (str, bytes, os.PathLike)
        ):  # else an open descriptor
            path = os.fsdecode(first)
            real, typed = os.path.realpath(path), os.path.abspath(path)  # noqa: PTH100  # follows no links
            if not _is_below(real, folders if _is_below(typed, folders) else besides):
                refused.append(_outside(path, real, folders))
                raise refused[-1]

    sys.addaudithook(check_event)
    return refused


def _outside(path: str, real: str, folders: Sequence[str]) -> ReshardError:
    return ReshardError(
        "path-outside-folders",
        "a path leads out of the folders of this server",
        file=path,
        expected=f"a local path below {listed(folders)}",
        found=real,
        remedy="name another path, or start the server with that folder too: reshard mcp FOLDER …",
    )


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return any(path == each or path.startswith(each.rstrip("/") + "/") for each in folders)
