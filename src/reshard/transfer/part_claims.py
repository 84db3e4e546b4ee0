"""Claims: with several machines, the files in the folder of a run that decide which worker writes a part.

Workers take parts themselves. A claim is a symbolic link whose target is the number of its worker: on every file
system that machines share, only one of them can create it, and it names its owner from the first moment on.

A worker that seems dead may only be cut off by the network, and would overwrite what was finished in its place. So each
worker holds a lock on a file of its own. The system or the file server releases it when the process ends: until then,
nobody else writes its parts, and no other run for the same output begins. If that file has grown, or is gone, its
worker stops.
"""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from reshard.base.errors import ReshardError
from reshard.transfer import locks

CLAIMS_FOLDER = "claims"
"""The folder, next to the output in the folder of the run, that has a folder of claims for each process that started
workers. Its name is random, so that a worker never mistakes a later run, or another machine's folder, for its own."""

CLAIM_TIMEOUT_SECONDS = 120.0
"""Seconds to wait for a worker that still holds its lock: longer than an NFS server takes to notice a lost client."""


class Claims:
    """The parts that `worker` takes, of `parts` in total: its share, every `workers`th part, then what others left.

    As long as it takes its share, workers do not compete. Threads may share this object.
    """

    def __init__(self, folder: Path, worker: int, workers: int, parts: int) -> None:
        self._folder, self._worker, self._parts = folder, worker, parts
        self._share = deque(range(worker, parts, workers))

    def take(self) -> int | None:
        """The number of a part that no other worker has claimed; None if none is left."""
        while numbers := self._next():
            for number in numbers:
                with suppress(FileExistsError):
                    (self._folder / f"{number}.claim").symlink_to(str(self._worker))
                    return number
        return None

    def _next(self) -> list[int]:
        with suppress(IndexError):
            return [self._share.popleft()]
        names = names_in(self._folder)
        return [number for number in range(self._parts) if f"{number}.claim" not in names]


@contextmanager
def working(folder: Path, worker: int) -> Iterator[Callable[[], bool]]:
    """Hold the lock of a worker during the block; yields a function that returns whether to stop.

    What an earlier process of the same number has not finished is free again. Raises OSError if that does not end, and
    if the folder is not there.
    """
    path = folder / f"{worker}.worker"
    is_free = release(folder, worker, CLAIM_TIMEOUT_SECONDS)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not is_free or locks.take(descriptor) is False:
            raise OSError(errno.EBUSY, "another process of this worker is still writing", str(path))
        yield lambda: _is_stopped(descriptor)
    finally:
        os.close(descriptor)


def _is_stopped(descriptor: int) -> bool:
    try:
        status = os.fstat(descriptor)
    except OSError:  # ESTALE
        return True
    return bool(status.st_size) or not status.st_nlink


def release(folder: Path, worker: int, patience: float = 0.0) -> bool:
    """Stop a worker and free the parts it has not finished. Returns False if it still writes after some seconds."""
    path = folder / f"{worker}.worker"
    with suppress(FileNotFoundError), path.open("r+b") as file:
        file.write(b"!")
        file.flush()
        if not _lock(file.fileno(), patience):
            return False
        for number in unfinished_parts(folder, worker):
            (folder / f"{number}.claim").unlink(missing_ok=True)
        path.unlink()
    return True


def _lock(descriptor: int, patience: float) -> bool:
    """Wait for a lock; True at once if the file system has no locks."""
    deadline = time.monotonic() + patience
    while locks.take(descriptor) is False:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def unfinished_parts(folder: Path, worker: int) -> list[int]:
    """The parts that a worker has claimed and not finished."""
    names = names_in(folder)
    claims = [folder / name for name in names if name.endswith(".claim")]
    open_claims = [path for path in claims if f"{path.stem}.done" not in names]
    return [int(path.stem) for path in open_claims if path.readlink().name == str(worker)]


def save(path: Path, content: Any) -> None:
    """Pickle `content` to a file that appears complete."""
    new = path.with_suffix(".new")
    new.write_bytes(pickle.dumps(content))
    new.replace(path)


def finished(folder: Path, numbers: Iterable[int]) -> Iterator[tuple[int, Any]]:
    """Those of the parts with these numbers that are finished, and what their workers saved as NUMBER.done."""
    names = names_in(folder)
    for number in [each for each in numbers if f"{each}.done" in names]:
        yield number, pickle.loads((folder / f"{number}.done").read_bytes())


def names_in(folder: Path) -> set[str]:
    """What is in a folder now, also if other machines have created it."""
    folder.chmod(folder.stat().st_mode)  # so that NFS looks again
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries}


def stop(folder: Path) -> None:
    """Tell all workers in `folder` to stop."""
    for path in folder.glob("*.worker"):
        with suppress(OSError), path.open("a") as file:
            file.write("!")


def withdraw(folder: Path) -> None:
    """Stop all workers of earlier runs, and wait for them. Raises ReshardError if that takes too long."""
    for run in folder.glob("*"):
        stop(run)
    deadline = time.monotonic() + CLAIM_TIMEOUT_SECONDS
    for path in folder.glob("*/*.worker"):
        if not release(path.parent, int(path.stem), deadline - time.monotonic()):
            # With an OSError as its cause, the error keeps what is written.
            raise ReshardError(
                "worker-still-writing",
                "a worker of an earlier run is still writing to the output",
                file=str(path),
                rule="only one run at a time may write to a destination",
                remedy="end the workers of that run, then run the same command again",
            ) from OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
    shutil.rmtree(folder, ignore_errors=True)
