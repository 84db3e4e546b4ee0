"""Output appears whole or not at all: written under a name of its own, made durable, renamed last.

Beside a destination `dst` there may lie, while a run lives or after it was killed:

- `.dst.lock-reshard`, locked by the run that writes to `dst` until it ends, however it ends. A lock is seen from other
  containers and, over NFS, from other machines, where a process number says nothing.
- `.dst.partial-1f0c9e2a`, what a run has written so far, or the old folder that its output has replaced. Whoever can
  take the lock may remove it.
- `.dst.replaced-1f0c9e2a`, the old folder while the new one takes its place. It may be the only copy of it, so it is
  put back or left alone, never removed.

Not all file systems have locks. There the rename decides: one of two runs has its output at `dst`, the other an error.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from reshard.errors import ReshardError, listed

TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
"""What a rename says where something stands at the destination that it does not replace."""


@contextmanager
def staged(target: Path, sizes: Mapping[str, int], *, overwrite: bool) -> Iterator[Path]:
    """A new empty folder that becomes `target` when the block ends well, and vanishes when it does not.

    By then it must hold the files `sizes` (bytes by relative path) and nothing else. With `overwrite` the old folder is
    moved aside, and removed once the new one stands in its place. Ctrl-C leaves the old one or the new one, whole.
    Raises ReshardError if another run writes to `target`, and if the system refuses to read or to write.
    """
    target = Path(os.path.realpath(target))  # a link to a folder stays a link
    folder = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
    made: list[Path] = []
    try:
        _make(target.parent, made)
        with _locked(target):
            try:
                folder.mkdir()
                with _there(folder, sizes):
                    yield folder
                _publish(folder, target, overwrite)
            finally:
                _despite_ctrl_c(lambda: shutil.rmtree(folder, ignore_errors=True))
    except BaseException as error:
        with suppress(OSError):  # not empty: others use them meanwhile
            for path in reversed(made):
                path.rmdir()
        if isinstance(error, OSError):
            raise _refused(error, target) from error
        raise


def _make(folder: Path, made: list[Path]) -> None:
    """Make a folder and those above it; `made` gets those that were not there."""
    if not folder.is_dir():
        _make(folder.parent, made)
        try:
            folder.mkdir()
            made.append(folder)
        except FileExistsError:
            if not folder.is_dir():  # else somebody was faster
                raise


@contextmanager
def _locked(target: Path) -> Iterator[bool]:
    """Be the only run that writes to `target`; False where the file system has no locks to tell.

    Raises ReshardError if another run is.
    """
    path = target.with_name(f".{target.name}.lock-reshard")
    while True:
        lock = _opened(path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            has_locks = True
        except BlockingIOError:
            os.close(lock)
            raise _busy(target, path) from None
        except OSError:
            has_locks = False
        if _is(path, os.fstat(lock)):
            break
        os.close(lock)  # whoever held it was done with it, and has removed it meanwhile
    try:
        yield has_locks
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(lock)


def _opened(lock: Path) -> int:
    try:
        return os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)  # NFS locks only what is open for writing
    except PermissionError:
        if lock.exists():  # of another user
            return os.open(lock, os.O_RDONLY)
        raise


def _is(path: Path, status: os.stat_result) -> bool:
    """Whether a path leads to what has this status, and not to something else of the same name."""
    try:
        return os.path.samestat(path.stat(), status)
    except OSError:
        return False


def _despite_ctrl_c(action: Callable[[], object]) -> None:
    """Do something to its end, though Ctrl-C interrupts it: begin again, and raise that when it is done."""
    again: KeyboardInterrupt | None = None
    while True:
        try:
            action()
            break
        except KeyboardInterrupt as error:
            again = error
    if again:
        raise again


def _publish(folder: Path, target: Path, overwrite: bool) -> None:
    """Make `folder` durable and put it in the place of `target`."""
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        _sync(path)
    new = folder.stat()
    aside = target.with_name(folder.name.replace(".partial-", ".replaced-"))

    def settle() -> None:
        """What is aside is of no use any more once the new folder stands there, and goes back where nothing does."""
        if _is(target, new):
            if aside.exists():
                aside.rename(folder)
            _sync(target.parent)
        elif aside.exists() and not target.exists():
            aside.rename(target)

    try:
        try:
            if overwrite and target.exists():
                target.rename(aside)
            folder.rename(target)  # which takes the place of an empty folder, too
        finally:
            _despite_ctrl_c(settle)
    except OSError as error:
        if error.errno in TAKEN:
            raise _taken(target, aside) from error
        raise


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _there(folder: Path, sizes: Mapping[str, int]) -> Iterator[None]:
    """Raise ReshardError unless `folder` holds what was planned when the block ends, or if it is gone before."""
    try:
        yield
    except (OSError, ReshardError) as error:
        if folder.exists():
            raise
        raise _spoilt(folder, sizes, {}) from error
    found = {}
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            found[path.relative_to(folder).as_posix()] = path.lstat().st_size
    if found != sizes:
        raise _spoilt(folder, sizes, found)


def _spoilt(folder: Path, sizes: Mapping[str, int], found: Mapping[str, int]) -> ReshardError:
    wrong = [f"{name} is missing" for name in sizes.keys() - found.keys()]
    wrong += [f"{name} should not be there" for name in found.keys() - sizes.keys()]
    wrong += [
        f"{name} has {found[name]} bytes and not {size}"
        for name, size in sizes.items()
        if found.get(name, size) != size
    ]
    return ReshardError(
        "the output was changed while it was written",
        file=str(folder),
        rule="all files that were planned are there, with their sizes, and nothing else",
        found=listed(sorted(wrong)) if folder.exists() else "the folder was removed",
        remedy="something else removes or writes files there: stop it, then run the same command again",
    )


def recover(target: Path) -> None:
    """Put right what runs that were killed left beside `target`; leave alone what may be of one that lives."""
    target = Path(os.path.realpath(target))
    if not (_beside(target, "partial") or _beside(target, "replaced")):
        return
    with suppress(ReshardError, OSError), _locked(target) as has_locks:
        replaced = sorted(_beside(target, "replaced"), key=lambda path: path.stat().st_ctime)
        if replaced and not (target.exists() and (not target.is_dir() or any(target.iterdir()))):
            replaced[-1].rename(target)  # which takes the place of an empty folder, too
        for leftover in _beside(target, "partial") if has_locks else ():
            shutil.rmtree(leftover, ignore_errors=True)


def put_aside(target: Path) -> list[Path]:
    """Old folders that were moved aside, and not put back because something else stands at `target`."""
    return _beside(Path(os.path.realpath(target)), "replaced")


def _beside(target: Path, kind: str) -> list[Path]:
    """The folders of runs beside a destination."""
    name = re.compile(re.escape(f".{target.name}.{kind}-") + "[0-9a-f]{8}")
    found = target.parent.glob(f".{glob.escape(target.name)}.{kind}-*")
    return [path for path in found if name.fullmatch(path.name) and path.is_dir()]


def _refused(error: OSError, target: Path) -> ReshardError:
    """What the system says when a disk is full, a folder read-only, a file gone."""
    return ReshardError(
        "the system refused to read or to write",
        file=str(error.filename or target),
        rule="the destination appears whole or not at all",
        found=error.strerror or str(error),
        remedy="free some space or choose another disk"
        if error.errno in (errno.ENOSPC, errno.EDQUOT)
        else "see to what the system reports, and run the same command again",
    )


def _busy(target: Path, lock: Path) -> ReshardError:
    return ReshardError(
        "another run is writing to the destination",
        file=str(target),
        rule="one run at a time writes to a destination",
        found=listed(
            [f"{path} is being written" for path in _beside(target, "partial")] or [f"{lock} is locked"]
        ),
        remedy="wait until it has ended, or choose another destination",
    )


def _taken(target: Path, aside: Path) -> ReshardError:
    kept = f"; what was there before is now {aside}" if aside.exists() else ""
    return ReshardError(
        "another process created the destination while this run was writing",
        file=str(target),
        rule="a run replaces only what it found when it began",
        found=listed(sorted(path.name for path in target.iterdir()) if target.is_dir() else ["a file"], 5)
        + kept,
        remedy="check what is there, or choose another destination",
    )
