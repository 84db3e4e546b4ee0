"""Locks on files, which the system takes back however their holder ends.

The package `filelock` gives other guarantees: it leaves its file in the user's folder, cannot lock a file of another
user, and where a file system has no locks, it makes a file that a killed run leaves behind for good.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Hold the lock at `path`, which is made, and removed in the end; False where the file system has no locks.

    Raises BlockingIOError if another process holds it, and OSError if it cannot be made.
    """
    while True:
        lock = _opened(path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            has_locks = True
        except BlockingIOError:
            os.close(lock)
            raise
        except OSError:
            has_locks = False
        if is_at(path, os.fstat(lock)):
            break
        os.close(lock)  # whoever held it was done with it, and has removed it meanwhile
    try:
        yield has_locks
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(lock)


def is_held(path: Path) -> bool:
    """Whether another process holds the lock at `path`, as far as the file system has locks to tell."""
    try:
        lock = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False


def is_at(path: Path, status: os.stat_result) -> bool:
    """Whether a path leads to what has this status, and not to something else of the same name."""
    try:
        return os.path.samestat(path.stat(), status)
    except OSError:
        return False


def _opened(lock: Path) -> int:
    try:
        return os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)  # NFS locks only what is open for writing
    except PermissionError:
        if lock.exists():  # of another user
            return os.open(lock, os.O_RDONLY)
        raise
