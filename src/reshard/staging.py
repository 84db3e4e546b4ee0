"""Output appears whole or not at all: written under a temporary name, made durable, renamed last."""

from __future__ import annotations

import errno
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from reshard.errors import Problem, ReshardError

BESIDE = "the result is made beside the destination, and takes its place when it is whole"


@contextmanager
def staged(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A new empty folder that becomes `target` when the block ends well, and vanishes when it does not.

    With `overwrite` the old folder is moved aside, and removed once the new one stands in its place. Raises
    ReshardError if the system refuses to read or to write.
    """
    target = target.resolve()  # a link to a folder stays a link
    created = [path for path in target.parents if not path.exists()]
    folder = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        folder.mkdir()
        yield folder
        _publish(folder, target, overwrite)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            for path in created:
                path.rmdir()
        if isinstance(error, OSError):
            raise _refused(error, target) from error
        raise


def _publish(folder: Path, target: Path, overwrite: bool) -> None:
    """Make `folder` durable and put it in the place of `target`."""
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        _sync(path)
    aside = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    try:
        if overwrite and target.exists():
            target.rename(aside)
        folder.rename(target)  # which takes the place of an empty folder, too
    except BaseException:
        if aside.exists() and not target.exists():
            aside.rename(target)
        raise
    with suppress(
        KeyboardInterrupt
    ):  # the new one is in place; what stays of the old is swept by the next run
        _sync(target.parent)
        shutil.rmtree(aside, ignore_errors=True)


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


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep(target: Path) -> None:
    """Remove what runs that were killed left beside `target`; put back what one had moved aside."""
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.*-*"):
        kind, _, pid = leftover.name[len(target.name) + 2 :].rpartition("-")
        if kind not in ("partial", "replaced") or not pid.isdigit() or Path(f"/proc/{pid}").exists():
            continue
        if kind == "replaced" and not target.exists():
            leftover.rename(target)
        else:
            shutil.rmtree(leftover, ignore_errors=True)


def check_target(source: Path, target: Path, *, overwrite: bool, replaceable: bool, needed: int) -> None:
    """Refuse a destination that would lose something or cannot hold the result.

    `replaceable` tells whether the folder is one checkpoint and nothing else, which `overwrite` may replace;
    `needed` is the size of the result in bytes. Raises ReshardError.
    """
    here, there = source.resolve(), target.resolve()
    parent = next(path for path in there.parents if path.exists())
    if here == there or there in here.parents:
        problems = [_holds_the_source(source, target)]
    elif there.is_dir() and any(there.iterdir()) and not (overwrite and replaceable):
        problems = [_not_empty(target, overwrite=overwrite)]
    elif there.exists() and not there.is_dir():
        problems = [Problem("the destination is a file", file=str(target), remedy="name a folder")]
    elif there.is_mount():
        remedy = f"name a folder in it: {target / source.name}"
        problems = [Problem("the destination is a mount point", file=str(target), rule=BESIDE, remedy=remedy)]
    else:
        problems = _unwritable(parent)
    if parent.is_dir() and (free := shutil.disk_usage(parent).free) < needed:
        problems.append(_too_small(parent, needed, free))
    if problems:
        raise ReshardError(problems)


def _holds_the_source(source: Path, target: Path) -> Problem:
    return Problem(
        "the source lies inside the destination",
        file=str(target),
        rule="the destination is replaced as a whole",
        found=f"source {source}",
        remedy="choose a destination outside of the source",
    )


def _not_empty(target: Path, *, overwrite: bool) -> Problem:
    remedy = "choose another folder"
    return Problem(
        "the destination is not empty",
        file=str(target),
        rule="old shards or a stale index never remain beside new ones",
        found=", ".join(sorted(path.name for path in target.iterdir())[:5]),
        remedy=remedy if overwrite else f"{remedy}, or give --overwrite to replace it",
        expected="an empty folder, or a checkpoint to replace, alone in it" if overwrite else None,
    )


def _unwritable(parent: Path) -> list[Problem]:
    """Why nothing can be made in `parent`, the folder where the destination would appear, or come to lie below."""
    if not parent.is_dir():
        return [Problem("the destination lies below a file", file=str(parent), remedy="name another folder")]
    if not os.access(parent, os.W_OK | os.X_OK):
        remedy = "choose a destination in a folder of yours, or have that one opened"
        return [Problem("nothing can be written here", file=str(parent), rule=BESIDE, remedy=remedy)]
    return []


def _too_small(parent: Path, needed: int, free: int) -> Problem:
    return Problem(
        "the disk is too small for the result",
        file=str(parent),
        rule="space is checked before the first byte is written",
        expected=f"{needed:,} bytes free",
        found=f"{free:,} bytes free",
        remedy="free some space, choose another disk, or a narrower --dtype",
    )
