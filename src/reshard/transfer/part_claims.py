"""Claims: with several machines, the lock files in the folder of the run that decide which worker may write a part.

A worker that seems dead may only be cut off by the network, and would overwrite what was finished in its place. So each
worker holds a lock on the claim of its part. The system or the file server releases it when the process ends: neither
the same part nor another run for the same output begins before. A claim that has grown, or is gone, tells its holder to
stop.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from reshard.base.errors import ReshardError
from reshard.transfer import locks

CLAIMS_FOLDER = "claims"
"""The folder of claims, next to the output in the folder of the run."""

CLAIM_TIMEOUT_SECONDS = 120.0
"""Seconds to wait for a worker that still holds a claim: longer than an NFS server takes to notice a lost client."""


class UnseenError(Exception):
    """This machine does not see the claim."""


def stake(path: Path, token: str) -> None:
    """Create the claim of a part; `token` distinguishes it from a file of the same name on another machine."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(token)


@contextmanager
def held(path: Path, token: str) -> Iterator[Callable[[], bool]]:
    """Hold a claim during the block; yields a function that returns whether to stop.

    Raises UnseenError if the claim is not there, and OSError if another process holds it for too long.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        raise UnseenError(path) from None
    try:
        if not os.pread(descriptor, 64, 0).startswith(token.encode()):
            raise UnseenError(path)
        if not _lock(descriptor, CLAIM_TIMEOUT_SECONDS):
            raise OSError(errno.EBUSY, "another worker still writes this part", str(path))
        yield lambda: _is_stopped(descriptor, len(token))
    finally:
        os.close(descriptor)


def _is_stopped(descriptor: int, size: int) -> bool:
    try:
        status = os.fstat(descriptor)
    except OSError:  # ESTALE
        return True
    return status.st_size != size or not status.st_nlink


def _lock(descriptor: int, patience: float) -> bool:
    """Wait for a lock; True at once if the file system has no locks."""
    deadline = time.monotonic() + patience
    while locks.take(descriptor) is False:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def stop(folder: Path) -> None:
    """Tell all holders of a claim in `folder` to stop."""
    for path in _claims(folder):
        with suppress(OSError), path.open("a") as file:
            file.write("!")


def withdraw(folder: Path) -> None:
    """Stop all workers of an earlier run, and wait for them. Raises ReshardError if that takes too long."""
    stop(folder)
    deadline = time.monotonic() + CLAIM_TIMEOUT_SECONDS
    for path in _claims(folder):
        with suppress(FileNotFoundError), path.open("r+b") as file:
            if not _lock(file.fileno(), deadline - time.monotonic()):
                # With an OSError as its cause, the error keeps what is written.
                raise ReshardError(
                    "worker-still-writing",
                    "a worker of an earlier run is still writing to the output",
                    file=str(path),
                    rule="only one run at a time may write to a destination",
                    remedy="end the workers of that run, then run the same command again",
                ) from OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
            path.unlink()


def _claims(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.claim"))
