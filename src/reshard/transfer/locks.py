"""Locks on files, which the system releases however their holder ends.

The package `filelock` gives other guarantees: it leaves its file in the user's folder, cannot lock a file of another
user, and on a file system without locks it creates a file that a killed run leaves behind forever.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Create and hold the lock at `path`, and remove it at the end; yields False if the file system has no locks.

    Raises BlockingIOError if another process holds it, and OSError if it cannot be created.
    """
    while True:
        lock = _open_lock(path)
        is_taken = take(lock)
        if is_taken is False:
            os.close(lock)
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), str(path))
        if is_at(path, os.fstat(lock)):
            break
        os.close(lock)  # its previous holder has released and removed it meanwhile
    try:
        yield is_taken is True
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(lock)


def is_held(path: Path) -> bool:
    """Whether another process holds the lock at `path`; False if the file system has no locks."""
    try:
        lock = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return take(lock, fcntl.LOCK_SH) is False
    finally:
        os.close(lock)


def take(lock: int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Whether the lock on an open file could be taken now; None if the file system has no locks."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_at(path: Path, status: os.stat_result) -> bool:
    """Whether `path` is the file with this status, and not another one of the same name."""
    try:
        return os.path.samestat(path.stat(), status)
    except OSError:
        return False


def _open_lock(lock: Path) -> int:
    try:
        return os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)  # NFS locks only files that are open for writing
    except PermissionError:
        if lock.exists():  # it belongs to another user
            return os.open(lock, os.O_RDONLY)
        raise
