"""Turn exceptions into problems that users can read, where they leave a command or a public function."""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reshard.base import missing_packages
from reshard.base.address_space import is_no_memory
from reshard.base.errors import Problem, ReshardError

LONGEST_NAME, LONGEST_PATH = 255, 4095
"""Bytes of a file name and of a path that the common file systems and Linux allow."""


@contextmanager
def for_users() -> Iterator[None]:
    """Turn the refusals of the system, and a lack of memory, into ReshardError. Decorates the public functions.

    What a stream refuses that is printed to, and errors that are bugs, are raised unchanged.
    """
    try:
        yield
    except (ReshardError, BrokenPipeError):
        raise
    except OSError as error:
        if failed_to_print(error):
            raise
        raise ReshardError(problems_of(error)) from error
    except Exception as error:
        if not is_no_memory(error):
            raise
        raise ReshardError([no_memory(error)]) from error


def failed_to_print(error: OSError) -> bool:
    """Whether an error is that of a stream, and not of a file: click and rich write to streams only."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("click", "rich")


def problems_of(error: Exception) -> list[Problem]:
    """The problems to report for an exception. An unforeseen one is reported as a bug in reshard."""
    if isinstance(error, ReshardError):
        return error.problems
    if is_no_memory(error):
        return [no_memory(error)]
    if isinstance(error, OSError):
        return [_refusal(error)]
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return [
            Problem(
                "out-of-threads",
                "the system cannot start more threads",
                found=str(error),
                remedy="end other programs, or raise the limit: `ulimit -u`, or the process limit of the container",
            )
        ]
    if isinstance(error, ImportError):
        return [
            Problem(
                "package-not-installed",
                "a package that this needs is not installed",
                found=str(error),
                remedy=missing_packages.remedy(error),
            )
        ]
    return [
        Problem(
            "unexpected-error",
            "unexpected internal error",
            found=f"{type(error).__name__}: {error}",
            remedy="this is a bug in reshard: please report the output of the same command with --debug",
        )
    ]


def no_memory(error: BaseException) -> Problem:
    """The problem to report when the system has no memory left."""
    path = getattr(error, "filename", None)
    message = str(getattr(error, "strerror", None) or error)
    return Problem(
        "out-of-memory",
        "the system has no memory left",
        file=os.fsdecode(path) if isinstance(path, (str, bytes)) else None,
        found=message.strip().rpartition("\n")[2] or None,
        remedy="end other programs, pass a smaller --memory, or raise the limits of the process (`ulimit -v`, "
        "the container's memory)",
    )


def _refusal(error: OSError) -> Problem:
    """What the system refused."""
    if isinstance(error, FileNotFoundError) and error.filename is None:  # what getcwd raises
        return Problem(
            "current-folder-gone",
            "the current folder was deleted",
            remedy="change to another one with `cd`",
        )
    if error.errno == errno.ENAMETOOLONG:
        return too_long(error)
    again = "and run the same command again"
    closed = _closed_folder(error)
    return Problem(
        "system-refused",
        "the system refused to read or to write",
        file=closed or (str(error.filename) if error.filename else None),
        found=f"no permission to search this folder for {Path(str(error.filename)).name}"
        if closed
        else error.strerror or str(error),
        remedy=f"ask its owner for permission, {again}"
        if isinstance(error, PermissionError)
        else f"fix what the system reports, {again}",
    )


def too_long(error: OSError) -> Problem:
    """The problem of a path or name that no file can have."""
    path = os.fsencode(error.filename) if isinstance(error.filename, (str, bytes)) else b""
    name = max(path.split(b"/"), key=len)
    length = (
        f"a name of {len(name):,} bytes" if len(name) > LONGEST_NAME else f"a path of {len(path):,} bytes"
    )
    return Problem(
        "path-exceeds-limit",
        "a path is longer than the system allows",
        file=os.fsdecode(path) or None,
        expected=f"at most {LONGEST_NAME} bytes in a name, and {LONGEST_PATH:,} in a path",
        found=length if path else None,
        remedy="correct the path, or choose a shorter one",
    )


def _closed_folder(error: OSError) -> str | None:
    """The folder whose permissions prevent looking for a file in it."""
    if not isinstance(error, PermissionError) or not isinstance(error.filename, str):
        return None
    folder = Path(error.filename).parent
    while not os.access(folder, os.F_OK) and folder != folder.parent:  # it is in a closed folder itself
        folder = folder.parent
    return None if os.access(folder, os.X_OK) else str(folder)
