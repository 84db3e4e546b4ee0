"""Output appears whole or not at all: written under a name of its own, made durable, renamed last.

Beside a destination `dst` there may lie, while a run lives or after it ended before its time:

- `.dst.lock-reshard`, locked by the run that writes to `dst` until it ends, however it ends. A lock is seen from other
  containers and, over NFS, from other machines, where a process number says nothing.
- `.dst.partial-1f0c9e2a`, a folder with what a run has written so far (`output`), and a journal of it. The name is a
  digest of all that the output is made of, so the same command finds it and continues. Whoever can take the lock may
  remove it. Once `dst` is there, it holds the old folder that was replaced.
- `.dst.replaced-1f0c9e2a`, the old folder while the new one takes its place. It may be the only copy of it, so it is
  put back or left alone, never removed.

Not all file systems have locks. There the names are random, no run continues another, and the rename decides: one of
two runs has its output at `dst`, the other an error.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from reshard.errors import ReshardError, listed, size
from reshard.transfer import claims
from reshard.transfer.journal import Identity, Journal, Progress, read_journal

TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
"""What a rename says where something stands at the destination that it does not replace."""

OUTPUT, JOURNAL, REPLACED = "output", "journal", "replaced"
"""What lies in the folder of a run: what will be the destination, the journal, and then what was there before."""

Prepare = Callable[[Path, bool], Mapping[str, str]]
"""Gets the folder of a run, and whether a lock is held. Gives what tells the state of each file that is elsewhere."""

OnResume = Callable[[str, int], None]
"""Hears in words what becomes of an unfinished conversion, and how many bytes of the output are there already."""


@contextmanager
def staged(
    target: Path,
    sizes: Mapping[str, int],
    *,
    overwrite: bool,
    journal: Journal | None = None,
    on_resume: OnResume = lambda note, nbytes: None,
) -> Iterator[Path]:
    """A folder that becomes `target` when the block ends well.

    By then it must hold the files `sizes` (bytes by relative path) and nothing else. With `overwrite` the old folder is
    moved aside, and removed once the new one stands in its place. Ctrl-C leaves the old one or the new one, whole.
    The folder is as in `worked`, and so is what is raised.
    """
    target = Path(os.path.realpath(target))  # a link to a folder stays a link
    journal = journal or Journal()
    with worked(target, sizes, journal=journal, on_resume=on_resume) as staging:
        with _there(staging / OUTPUT, sizes):
            yield staging / OUTPUT
        _publish(staging, target, overwrite, journal)


@contextmanager
def worked(
    target: Path,
    sizes: Mapping[str, int],
    *,
    journal: Journal,
    on_resume: OnResume,
    prepare: Prepare = lambda staging, has_locks: {},
) -> Iterator[Path]:
    """The folder of the one run that writes to `target`, with `OUTPUT` in it, removed when the block ends.

    It is new and empty, unless a `journal` with an identity is given and an earlier block for the same identity
    was ended by something that may pass: by the system, or by Ctrl-C. Then the journal, which is open in the block,
    says what the folder holds. What was written for another identity is removed. `prepare` may say which files are
    elsewhere, before the journal is opened.
    Raises ReshardError if another run writes to `target`, and if the system refuses to read or to write.
    """
    kept = 0
    made: list[Path] = []
    try:
        _make(target.parent, made)
        with _locked(target) as has_locks:
            staging = _place(target, journal, has_locks, on_resume)
            try:
                (staging / OUTPUT).mkdir(parents=True, exist_ok=True)
                _open(journal, staging, sizes, prepare(staging, has_locks), has_locks, on_resume)
                yield staging
            except BaseException as error:
                kept = _written(staging) if may_pass(error) else 0
                raise
            finally:
                journal.close()
                if not kept:
                    _despite_ctrl_c(lambda: shutil.rmtree(staging, ignore_errors=True))
    except BaseException as error:
        with suppress(OSError):  # not empty: others use them meanwhile
            for path in reversed(made):
                path.rmdir()
        if isinstance(error, OSError):
            raise _refused(error, target, kept) from error
        if kept and isinstance(error, ReshardError):
            on_resume(f"{size(kept)} are written and kept: the same command continues from there", 0)
        raise


def _place(target: Path, journal: Journal, has_locks: bool, on_resume: OnResume) -> Path:
    """The folder of a run. Unless another run may live, what others have left for the same target is removed."""
    identity = journal.identity if has_locks else None
    name = identity.name if identity else secrets.token_hex(4)
    staging = target.with_name(f".{target.name}.partial-{name}")
    for folder in _beside(target, "partial") if has_locks else ():
        found = _journal_of(folder)
        is_same = found is not None and folder == staging and found[0] == identity
        if is_same and _is_ours(folder):
            continue
        if found and found[2].nbytes:
            why = identity.why_not(found[0]) if identity else "--no-resume is given"
            why = "another user wrote it" if is_same else why
            on_resume(f"starting anew: {size(found[2].nbytes)} of an unfinished run are removed, as {why}", 0)
        shutil.rmtree(folder, ignore_errors=True)
        if folder == staging and folder.exists():  # of another user
            staging = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
    return staging


def _open(
    journal: Journal,
    staging: Path,
    sizes: Mapping[str, int],
    elsewhere: Mapping[str, str],
    has_locks: bool,
    on_resume: OnResume,
) -> None:
    """Open the journal, if the run can be continued."""
    if journal.identity is None:
        return
    if not has_locks:
        on_resume("this file system has no locks, so a run that is interrupted starts from the beginning", 0)
        return
    claims.withdraw(staging / claims.FOLDER)
    journal.open(staging / JOURNAL, staging / OUTPUT, sizes, elsewhere)
    if done := journal.progress.nbytes:
        on_resume(f"continuing: {size(done)} of {size(sum(sizes.values()))} are written already", done)


def _journal_of(folder: Path) -> tuple[Identity, Mapping[str, Any], Progress] | None:
    """The journal of a run that can be continued: its output has not been published."""
    is_unfinished = (folder / OUTPUT).is_dir() and not (folder / REPLACED).exists()
    return read_journal(folder / JOURNAL) if is_unfinished else None


def _is_ours(folder: Path) -> bool:
    """Whether the folder of a run belongs to who makes a folder there now: in /tmp, for one, anybody may make it."""
    probe = folder / f"probe-{secrets.token_hex(4)}"
    try:
        probe.mkdir()
        owner = probe.stat().st_uid
        probe.rmdir()
        return {path.lstat().st_uid for path in (folder, folder / OUTPUT, folder / JOURNAL)} == {owner}
    except OSError:
        return False


def _written(folder: Path) -> int:
    """Bytes of an output that a run which continues does not write again."""
    found = _journal_of(folder)
    return found[2].nbytes if found else 0


def may_pass(error: BaseException) -> bool:
    """Whether the same command may well succeed after this: it was interrupted, or the system refused something."""
    causes = (error, error.__cause__) if isinstance(error, ReshardError) else (error,)
    return any(isinstance(each, (OSError, MemoryError, KeyboardInterrupt)) for each in causes)


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


def _publish(staging: Path, target: Path, overwrite: bool, journal: Journal) -> None:
    """Make the output of a run durable and put it in the place of `target`."""
    folder = staging / OUTPUT
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        journal.sync(path)
    new = folder.stat()
    aside = target.with_name(f".{target.name}.replaced-{secrets.token_hex(4)}")

    def settle() -> None:
        """What is aside is of no use any more once the new folder stands there, and goes back where nothing does."""
        if _is(target, new):
            if aside.exists():
                aside.rename(staging / REPLACED)
            journal.sync(target.parent)
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
        "output-changed",
        "the output was changed while it was written",
        file=str(folder),
        rule="all files that were planned are there, with their sizes, and nothing else",
        found=listed(sorted(wrong)) if folder.exists() else "the folder was removed",
        remedy="something else removes or writes files there: stop it, then run the same command again",
    )


def recover(target: Path) -> None:
    """Put right what runs that were killed left beside `target`.

    What may be of one that lives is left alone, and what can be continued stays.
    """
    target = Path(os.path.realpath(target))
    if not (_beside(target, "partial") or _beside(target, "replaced")):
        return
    with suppress(ReshardError, OSError), _locked(target) as has_locks:
        replaced = sorted(_beside(target, "replaced"), key=lambda path: path.stat().st_ctime)
        if replaced and not (target.exists() and (not target.is_dir() or any(target.iterdir()))):
            replaced[-1].rename(target)  # which takes the place of an empty folder, too
        for leftover in _beside(target, "partial") if has_locks else ():
            if not _journal_of(leftover):
                shutil.rmtree(leftover, ignore_errors=True)


def put_aside(target: Path) -> list[Path]:
    """Old folders that were moved aside, and not put back because something else stands at `target`."""
    return _beside(Path(os.path.realpath(target)), "replaced")


@dataclass(frozen=True)
class Unfinished:
    """What a run left that ended before its time, or is writing now.

    `nbytes` of `total` are written (None if nobody can continue it), `modified` is the time of the last progress in
    seconds, `command` continues it in any folder, `live` says that a run is at work.
    """

    folder: Path
    nbytes: int | None
    total: int | None
    modified: float
    command: str
    live: bool

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "folder": str(self.folder),
            "written": self.nbytes,
            "bytes": self.total,
            "modified": datetime.fromtimestamp(self.modified).astimezone().isoformat(timespec="seconds"),
            "command": self.command,
            "live": self.live,
        }


def unfinished(target: Path) -> list[Unfinished]:
    """The unfinished conversions beside a destination."""
    target = Path(os.path.realpath(target))
    found = []
    live = _is_locked(target)
    for folder in _beside(target, "partial"):
        with suppress(OSError):  # it is just being removed
            journal = _journal_of(folder)
            path = folder / JOURNAL if journal else folder
            facts = journal[1] if journal else {}
            total = facts.get("bytes")
            found.append(
                Unfinished(
                    folder,
                    journal[2].nbytes if journal else None,
                    total if isinstance(total, int) else None,
                    path.stat().st_mtime,
                    _anywhere(facts),
                    live,
                )
            )
    return found


def _anywhere(facts: Mapping[str, Any]) -> str:
    """The command that a journal was begun with, which may have paths from the folder where it was typed."""
    command, folder = str(facts.get("command", "")), str(facts.get("folder", ""))
    with suppress(OSError):  # this folder is gone
        if command and folder and folder != str(Path.cwd()):
            return f"cd {shlex.quote(folder)} && {command}"
    return command


def remove_unfinished(target: Path, age: float) -> list[Unfinished]:
    """Remove, and return, the unfinished conversions that nothing was added to for `age` seconds.

    Raises ReshardError if a run writes to `target`, or if the file system has no locks to tell.
    """
    target = Path(os.path.realpath(target))
    if not unfinished(target):
        return []
    with _locked(target) as has_locks:
        old = [each for each in unfinished(target) if each.modified <= time.time() - age]
        if old and not has_locks:
            raise ReshardError(
                "locks-unsupported",
                "this file system has no locks, so nobody can tell whether a run is still writing",
                file=str(target.parent),
                found=listed([str(each.folder) for each in old]),
                remedy="make sure that no run is writing there, and remove these folders yourself",
            )
        for each in old:
            shutil.rmtree(each.folder, ignore_errors=True)
    return old


def reusable(target: Path) -> int:
    """Bytes of the disk that unfinished conversions hold, which the next one continues or removes."""
    target = Path(os.path.realpath(target))
    folders = [folder for folder in _beside(target, "partial") if _journal_of(folder)]
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return sum(path.lstat().st_blocks * 512 for path in files)


def _is_locked(target: Path) -> bool:
    try:
        lock = os.open(target.with_name(f".{target.name}.lock-reshard"), os.O_RDONLY)
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


def _beside(target: Path, kind: str) -> list[Path]:
    """The folders of runs beside a destination."""
    name = re.compile(re.escape(f".{target.name}.{kind}-") + "[0-9a-f]{8}")
    found = target.parent.glob(f".{glob.escape(target.name)}.{kind}-*")
    return [path for path in found if name.fullmatch(path.name) and path.is_dir()]


def _refused(error: OSError, target: Path, kept: int) -> ReshardError:
    """What the system says when a disk is full, a folder read-only, a file gone. `kept` bytes are not lost."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    first = "free some space" if is_full else "see to what the system reports"
    return ReshardError(
        "system-refused",
        "the system refused to read or to write",
        file=str(error.filename or target),
        rule="the destination appears whole or not at all",
        found=error.strerror or str(error),
        remedy=f"{first}, then run the same command again: {size(kept)} are written, and it continues from there"
        if kept
        else "free some space or choose another disk"
        if is_full
        else "see to what the system reports, and run the same command again",
    )


def _busy(target: Path, lock: Path) -> ReshardError:
    return ReshardError(
        "destination-in-use",
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
        "destination-created-meanwhile",
        "another process created the destination while this run was writing",
        file=str(target),
        rule="a run replaces only what it found when it began",
        found=listed(sorted(path.name for path in target.iterdir()) if target.is_dir() else ["a file"], 5)
        + kept,
        remedy="check what is there, or choose another destination",
    )
