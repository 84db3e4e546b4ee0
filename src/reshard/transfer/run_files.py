"""The lock and the folders next to a destination `dst` while a run is active, or after it was interrupted.

- `.dst.lock-reshard`, locked by the run that writes to `dst` until it ends, in any way. Other containers see a lock,
  and over NFS other machines too; a process number means nothing there.
- `.dst.partial-1f0c9e2a`, a folder with what a run has written so far (`output`) and its journal. The name is a
  digest of everything that determines the output, so the same command finds it and continues. Whoever can take the
  lock may remove it. Once `dst` is published, this folder contains the one that was replaced.
- `.dst.replaced-1f0c9e2a`, the old folder, or file, while the new one takes its place. It may be the only copy, so it
  is put back or left alone. It is removed only if a run named it before its output took its place.

Not all file systems have locks. Without them the names are random, no run continues another, and the rename decides:
one of two runs has its output at `dst`, the other fails with an error.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from reshard.base.errors import ReshardError, listed
from reshard.transfer import locks

OUTPUT, JOURNAL, ASIDE, REPLACED = "output", "journal", "aside", "replaced"
"""Names in the folder of a run: the future destination, the journal, and later a file with the name that the old folder
has while it is aside, and this folder itself."""
MARKER = "reshard-unfinished.json"
"""In a store: the object that exists until the output is complete."""
MIN_RENEWAL_SECONDS = 5.0
"""Least seconds between two renewals of a marker, if files are uploaded faster."""


def partials(target: Path) -> list[Path]:
    """The folders of runs next to a destination."""
    return _siblings(target, "partial")


def move_aside(target: Path) -> list[Path]:
    """Old folders that were moved aside and not put back, the latest first."""
    return sorted(_siblings(target, "replaced"), key=lambda path: path.lstat().st_ctime, reverse=True)


def _siblings(target: Path, kind: str) -> list[Path]:
    target = Path(os.path.realpath(target))
    name = re.compile(re.escape(f".{target.name}.{kind}-") + "[0-9a-f]{8}")
    siblings = target.parent.glob(f".{glob.escape(target.name)}.{kind}-*")
    return [path for path in siblings if name.fullmatch(path.name) and (path.is_dir() or kind == "replaced")]


@contextmanager
def locked(target: Path) -> Iterator[bool]:
    """Lock `target` for this run during the block; yields False if the file system has no locks.

    Raises ReshardError if another run is writing to it.
    """
    path = _lock_of(target)
    with ExitStack() as stack:
        try:
            has_locks = stack.enter_context(locks.held(path))
        except BlockingIOError:
            raise _busy(target, path) from None
        yield has_locks


def is_locked(target: Path) -> bool:
    """Whether a run is writing to `target` now; False if the file system has no locks."""
    return locks.is_held(_lock_of(target))


def _lock_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.lock-reshard")


def _busy(target: Path, lock: Path) -> ReshardError:
    return ReshardError(
        "destination-in-use",
        "another run is writing to the destination",
        file=str(target),
        rule="only one run at a time may write to a destination",
        found=listed([f"{path} is being written" for path in partials(target)] or [f"{lock} is locked"]),
        remedy="wait until it ends, or choose another destination",
    )
