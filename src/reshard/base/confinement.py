"""What a server may do: read files below its folders, and nothing else.

Paths that a client names are checked first. Links, and names in indexes and configs, lead to other files later: so the
process that reads checks, by Python's audit events, each file that any module opens, and each folder that it lists.
Installed packages, /proc and /sys are also readable.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Collection, Sequence
from typing import Any

from reshard.base.errors import ReshardError, listed

READING_EVENTS = ("open", "os.listdir", "os.scandir")
CONNECTING_EVENTS = ("socket.connect", "socket.getaddrinfo", "socket.sendto", "socket.sendmsg")
REFUSED_EVENTS = (
    *("os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.setxattr"),
    *("os.symlink", "os.truncate", "os.utime", "os.exec", "os.fork", "os.posix_spawn", "os.system"),
    *("subprocess.Popen", "socket.bind", *CONNECTING_EVENTS),
)
"""Events of all else that a process could do: writing, starting programs, connecting to others."""
MCP = "reshard mcp FOLDER …"
WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def located(named: str, folders: Sequence[str]) -> str:
    """The real path of what a client named. Raises ReshardError if it is not below `folders`."""
    is_path = "://" not in named and "\0" not in named
    real = os.path.realpath(os.path.join(folders[0], named)) if is_path else named  # noqa: PTH118
    if not _is_below(real, folders):
        raise _outside(named, real, folders, MCP)
    return real


def confine(
    folders: Sequence[str],
    packages: Sequence[str],
    *,
    command: str = MCP,
    refused_events: Collection[str] = REFUSED_EVENTS,
) -> list[ReshardError]:
    """Refuse this process everything but reading below `folders`. It cannot be undone.

    `command` is how a user starts it with more folders.

    Returns the list to which paths elsewhere are added when they are refused: who reads may take that for damage.
    """
    refused: list[ReshardError] = []
    own = [sys.prefix, sys.base_prefix, *filter(None, packages), "/proc", "/sys", os.devnull]
    besides = [*folders, *own, *map(os.path.realpath, own)]

    def check_event(event: str, arguments: tuple[Any, ...]) -> None:
        first = arguments[0] if arguments else None
        if event in refused_events or (
            event == "open" and arguments[2] & WRITING_FLAGS and first != os.devnull
        ):
            raise PermissionError(errno.EPERM, f"this process only reads: {event}")
        if event == "import" and first == "tensorstore":
            raise ReshardError(
                "orbax-not-confined",
                "a server does not read Orbax checkpoints, because tensorstore opens files without an event",
                remedy="run the command in a shell",
            )
        if event in READING_EVENTS and isinstance(
            first, (str, bytes, os.PathLike)
        ):  # else an open descriptor
            path = os.fsdecode(first)
            real, typed = os.path.realpath(path), os.path.abspath(path)  # noqa: PTH100  # follows no links
            if not _is_below(real, folders if _is_below(typed, folders) else besides):
                refused.append(_outside(path, real, folders, command))
                raise refused[-1]

    sys.addaudithook(check_event)
    return refused


def _outside(path: str, real: str, folders: Sequence[str], command: str) -> ReshardError:
    return ReshardError(
        "path-outside-folders",
        "a path leads out of the folders of this server",
        file=path,
        expected=f"a local path below {listed(folders)}",
        found=real,
        remedy=f"name another path, or start the server with that folder too: {command}",
    )


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return any(path == each or path.startswith(each.rstrip("/") + "/") for each in folders)
