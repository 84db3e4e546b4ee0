"""Staging: the output appears complete or not at all. It is written under another name, made durable, renamed last.

`run_files.py` describes what is next to a destination meanwhile, and what may remain there.
"""

from __future__ import annotations

import errno
import os
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path

from reshard.base.errors import ReshardError, cause_of, listed
from reshard.base.exceptions_to_problems import too_long
from reshard.base.quantities import size
from reshard.transfer import part_claims
from reshard.transfer.journal import SOURCE_CHANGED, Journal, JournalContent, OutputIdentity
from reshard.transfer.leftovers import journal_of
from reshard.transfer.locks import is_at
from reshard.transfer.run_files import ASIDE, JOURNAL, OUTPUT, REPLACED, locked, partials
from reshard.transfer.threads import despite_ctrl_c

SINGLE_FILE = "single"
"""The name of a single file, in the folder of its run, just before it is published."""
KEPT_SUFFIX = ".kept"
"""Suffix of the name of a user's file if the new folder has one of the same name."""
OCCUPIED_ERRORS = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
"""Errors of a rename to a destination where something exists that it does not replace."""

Prepare = Callable[[Path, bool], Mapping[str, str]]
"""Callback that receives the folder of a run, and whether a lock is held; returns the state of each file elsewhere."""

OnResume = Callable[[str, int], None]
"""Callback that receives a note on an unfinished conversion, and the bytes of the output that are written already."""


@contextmanager
def staged(
    target: Path,
    sizes: Mapping[str, int],
    *,
    overwrite: bool,
    journal: Journal | None = None,
    on_resume: OnResume = lambda note, nbytes: None,
    keeps: Callable[[], Sequence[str]] = list,
    single: str | None = None,
) -> Iterator[Path]:
    """A folder that becomes `target` if the block succeeds, or of which only the file `single` does.

    At its end it must contain exactly the files `sizes` (bytes by relative path). With `overwrite` the old folder is
    moved aside, and removed once the new one is in its place; those of its files that it then `keeps`, by their
    relative paths, are also in the new one, unless that has files of their names. Ctrl-C leaves the old one or the new
    one, complete. The folder and the exceptions are those of `worked`.
    """
    target = Path(os.path.realpath(target))  # a link to a folder stays a link
    journal = journal or Journal()
    with worked(target, sizes, journal=journal, on_resume=on_resume) as staging:
        for name in (
            _files(staging / OUTPUT) - sizes.keys()
        ):  # kept by a run that was killed before its last rename
            (staging / OUTPUT / name).unlink()
        with _with_planned_files(staging / OUTPUT, sizes):
            yield staging / OUTPUT
        for name in set(keeps()) - sizes.keys() if overwrite else ():
            _link(target / name, staging / OUTPUT / name, journal)
        _publish(staging, target, overwrite, journal, single)


def publish(folder: Path, target: Path, keeps: Sequence[str]) -> list[str]:
    """Rename a finished folder to `target`, and return the names of what is kept of what was there.

    Of an old folder, the files and folders that `keeps` names are also in the new one; a file is kept itself. Where
    the name is taken, another one is chosen. A kill leaves the old folder or the new one, complete. Raises ReshardError
    if another run is writing to `target`, or if the system refuses.
    """
    target = Path(os.path.realpath(target))
    journal, kept = Journal(), []
    with worked(target, {}, journal=journal, on_resume=lambda note, nbytes: None) as staging:
        if target.is_file():
            kept.append(target.rename(_free(target)).name)
        for name in keeps:
            link = _free(folder / name)
            _link(target / name, link, journal)
            kept.append(link.relative_to(folder).as_posix())
        (staging / OUTPUT).rmdir()
        folder.rename(staging / OUTPUT)
        _publish(staging, target, True, journal, None)
    return sorted(kept)


def _free(path: Path) -> Path:
    """A path, or if it exists, a name next to it at which nothing is."""
    names = (path.with_name(f"{path.name}{KEPT_SUFFIX}{number or ''}") for number in count())
    return next(each for each in chain([path], names) if not each.exists() and not each.is_symlink())


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

    It is new and empty, unless `journal` has an identity and an earlier block with the same identity failed for a
    reason that may pass: a system error, or Ctrl-C. Then the journal, which is open in the block, records what the
    folder contains. What was written for another identity is removed. `prepare`, called before the journal is opened,
    may return which files are elsewhere. Raises ReshardError if another run is writing to `target`, and if the system
    refuses to read or to write.
    """
    kept: int | None = 0
    new_folders: list[Path] = []
    try:
        _make(target.parent, new_folders)
        with locked(target) as has_locks:
            identity = journal.identity if has_locks else None
            staging = _staging_folder(target, identity)
            try:
                if has_locks:
                    staging = _clear_leftovers(target, staging, identity, on_resume)
                (staging / OUTPUT).mkdir(parents=True, exist_ok=True)
                _open(journal, staging, sizes, prepare(staging, has_locks), has_locks, on_resume)
                yield staging
            except BaseException as error:
                kept = _kept_bytes(staging) if may_pass(error) else 0
                raise
            finally:
                journal.close()
                if kept == 0:
                    despite_ctrl_c(lambda: shutil.rmtree(staging, ignore_errors=True))
    except BaseException as error:
        with suppress(OSError):  # not empty: others use it meanwhile
            for path in reversed(new_folders):
                path.rmdir()
        if isinstance(error, OSError):
            raise _refusal(error, target, kept) from error
        if kept and isinstance(error, ReshardError):
            on_resume(f"{size(kept)} are written and kept: the same command continues from there", 0)
        raise


def _staging_folder(target: Path, identity: OutputIdentity | None) -> Path:
    """The folder of a run, named so that the next run with the same identity finds it."""
    return target.with_name(f".{target.name}.partial-{identity.name if identity else secrets.token_hex(4)}")


def _clear_leftovers(
    target: Path, staging: Path, identity: OutputIdentity | None, on_resume: OnResume
) -> Path:
    """`staging`, after removing what others left for the same target; another folder if it belongs to another user.

    Raises OSError if the system does not show what is there, so that nothing useful is removed.
    """
    for folder in partials(target):
        before = journal_of(folder) or JournalContent()
        is_same = before.identity is not None and folder == staging and before.identity == identity
        if is_same and _is_ours(folder):
            continue
        if before.identity and before.nbytes:
            why = identity.why_not(before.identity) if identity else "--no-resume is given"
            why = "another user wrote it" if is_same else why
            on_resume(
                f"starting over: {size(before.nbytes)} of an unfinished run are removed, because {why}", 0
            )
        shutil.rmtree(folder, ignore_errors=True)
        if folder == staging and folder.exists():  # it belongs to another user
            staging = _staging_folder(target, None)
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
    part_claims.withdraw(staging / part_claims.CLAIMS_FOLDER)
    if lost := journal.open(staging / JOURNAL, staging / OUTPUT, sizes, elsewhere):
        on_resume(
            f"starting over: {size(lost)} of an unfinished run are useless, because {SOURCE_CHANGED}", 0
        )
    if done := journal.progress.nbytes:
        on_resume(f"continuing: {size(done)} of {size(sum(sizes.values()))} are written already", done)


def _is_ours(folder: Path) -> bool:
    """Whether the folder of a run belongs to this user, as new folders in it do: anyone may create one in /tmp."""
    probe = folder / f"probe-{secrets.token_hex(4)}"
    try:
        probe.mkdir()
    except PermissionError:
        return False
    try:
        owner = probe.stat().st_uid
    finally:
        probe.rmdir()
    return {path.lstat().st_uid for path in (folder, folder / OUTPUT, folder / JOURNAL)} == {owner}


def _kept_bytes(folder: Path) -> int | None:
    """Bytes of the output that a continued run does not write again; None if the system does not show them."""
    try:
        return (journal_of(folder) or JournalContent()).nbytes
    except OSError:
        return None


def may_pass(error: BaseException) -> bool:
    """Whether the same command may succeed later: it was interrupted, or the system refused something."""
    causes = (error, error.__cause__) if isinstance(error, ReshardError) else (error,)
    return any(isinstance(each, (OSError, MemoryError, KeyboardInterrupt)) for each in causes)


def _make(folder: Path, new_folders: list[Path]) -> None:
    """Create a folder and its parents, and append those that did not exist to `new_folders`."""
    if not folder.is_dir():
        _make(folder.parent, new_folders)
        try:
            folder.mkdir()
            new_folders.append(folder)
        except FileExistsError:
            if not folder.is_dir():  # otherwise another process was faster
                raise


def _link(file: Path, link: Path, journal: Journal) -> None:
    """A second name for a file, or a copy if the system makes none: the first one will be removed. So for a folder."""
    if file.is_dir() and not file.is_symlink():
        shutil.copytree(
            file, link, symlinks=True, copy_function=lambda a, b: _link(Path(a), Path(b), journal)
        )
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, link, follow_symlinks=False)
    except (OSError, NotImplementedError):
        shutil.copy2(file, link, follow_symlinks=False)
        if not link.is_symlink():
            journal.sync(link)


def _move_into_place(output: Path, target: Path) -> None:
    """Rename the output to a destination where nothing is, or an empty folder."""
    if not output.is_file():
        output.rename(target)  # this also replaces an empty folder
        return
    if target.exists():  # a file would be replaced
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    output.rename(target)


def _single_file(staging: Path, single: str) -> Path:
    """The one file that is the output, without the folder around it."""
    alone = (staging / OUTPUT / single).rename(staging / SINGLE_FILE)
    shutil.rmtree(staging / OUTPUT)
    return alone


def _publish(staging: Path, target: Path, overwrite: bool, journal: Journal, single: str | None) -> None:
    """Make the output of a run durable and rename it to `target`."""
    folder = staging / OUTPUT
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        journal.sync(path)
    output = _single_file(staging, single) if single else folder
    new = output.stat()
    aside = target.with_name(f".{target.name}.replaced-{secrets.token_hex(4)}")
    (staging / ASIDE).write_text(aside.name)  # so that `recover` knows what the output has replaced

    placed = False

    def settle() -> None:
        """Move the old folder to the run's if the new one took its place; put it back if there is none."""
        if placed or is_at(target, new):  # another run may have replaced the new one since
            if aside.exists():
                aside.rename(staging / REPLACED)
            journal.sync(target.parent)
        elif aside.exists() and not target.exists():
            aside.rename(target)

    try:
        try:
            if overwrite and target.exists():
                target.rename(aside)
            _move_into_place(output, target)
            placed = True
        finally:
            despite_ctrl_c(settle)
    except OSError as error:
        raise _unpublished(error, target, aside, is_new=is_at(target, new)) from error


@contextmanager
def _with_planned_files(folder: Path, sizes: Mapping[str, int]) -> Iterator[None]:
    """Raise ReshardError unless `folder` contains what was planned when the block ends, or if it is removed earlier."""
    try:
        yield
    except (OSError, ReshardError) as error:
        if folder.exists():
            raise
        raise _output_changed(folder, sizes, {}) from cause_of(error)
    actual = {name: (folder / name).lstat().st_size for name in _files(folder)}
    if actual != sizes:
        raise _output_changed(folder, sizes, actual)


def _files(folder: Path) -> set[str]:
    """The relative paths of all files in a folder."""
    return {
        Path(place, name).relative_to(folder).as_posix()
        for place, _, names in os.walk(folder)
        for name in names
    }


def _output_changed(folder: Path, sizes: Mapping[str, int], actual: Mapping[str, int]) -> ReshardError:
    wrong = [f"{name} is missing" for name in sizes.keys() - actual.keys()]
    wrong += [f"{name} should not be there" for name in actual.keys() - sizes.keys()]
    wrong += [
        f"{name} has {actual[name]} bytes and not {size}"
        for name, size in sizes.items()
        if actual.get(name, size) != size
    ]
    return ReshardError(
        "output-changed",
        "the output was changed while it was written",
        file=str(folder),
        rule="the folder must contain exactly the planned files with their sizes",
        found=listed(sorted(wrong)) if folder.exists() else "the folder was removed",
        remedy="something else removes or writes files there: stop it, then run the same command again",
    )


def _refusal(error: OSError, target: Path, kept: int | None) -> ReshardError:
    """The error for a full disk, a read-only folder, a missing file.

    `kept` bytes are not lost; None if their number is unknown.
    """
    if error.errno == errno.ENAMETOOLONG:
        return ReshardError(too_long(error))
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    first = "free some space" if is_full else "fix what the system reports"
    if kept:
        remedy = (
            f"{first}, then run the same command again: {size(kept)} are written, and it continues from there"
        )
    elif kept is None:
        remedy = f"{first}, then run the same command again: it continues from what is written"
    else:
        remedy = f"{first} or choose another disk" if is_full else f"{first}, and run the same command again"
    return ReshardError(
        "system-refused",
        "the system refused to read or to write",
        file=str(error.filename or target),
        rule="the destination appears complete or not at all",
        found=error.strerror or str(error),
        remedy=remedy,
    )


def _unpublished(error: OSError, target: Path, aside: Path, *, is_new: bool) -> ReshardError:
    """The error for an output that is complete but cannot be renamed; says where the old folder is."""
    reason = error.strerror or str(error)
    if is_new and aside.exists():
        return ReshardError(
            "old-folder-left",
            "the output is complete, and the folder that it replaced cannot be removed",
            file=str(aside),
            found=reason,
            remedy=f"remove it yourself: rm -r {shlex.quote(str(aside))}",
        )
    if is_new:
        return _refusal(error, target, 0)
    if error.errno in OCCUPIED_ERRORS:
        return _occupied(target, aside)
    if aside.exists():
        return ReshardError(
            "old-folder-not-put-back",
            "the output could not be renamed to the destination, nor the old folder put back there",
            file=str(target),
            found=f"{reason}; what was there before is now {aside}",
            remedy=f"put it back yourself: mv {shlex.quote(str(aside))} {shlex.quote(str(target))}",
        )
    if target.exists():
        return ReshardError(
            "old-folder-not-moved",
            "the output cannot take the place of the old folder",
            file=str(target),
            rule="the old folder is moved aside by a rename, which failed",
            found=reason,
            remedy="move it elsewhere yourself, or convert to a folder on another file system",
        )
    return ReshardError(
        "output-not-renamed",
        "the output cannot be renamed to the destination",
        file=str(target),
        rule="the output is written next to the destination and then renamed",
        found=reason,
        remedy="convert to a folder on another file system",
    )


def _occupied(target: Path, aside: Path) -> ReshardError:
    kept = f"; what was there before is now {aside}" if aside.exists() else ""
    return ReshardError(
        "destination-created-meanwhile",
        "another process created the destination while this run was writing",
        file=str(target),
        rule="a run replaces only what existed when it began",
        found=listed(sorted(path.name for path in target.iterdir()) if target.is_dir() else ["a file"], 5)
        + kept,
        remedy="check what is there, or choose another destination",
    )
