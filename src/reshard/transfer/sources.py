"""What is read: regular files alone, noted when they are opened, so that a change before the end is seen.

Headers are read long before the tensors that they describe. A file that is written again meanwhile, cut short or zeroed
may still be read to its end, into a model that never was. A FIFO or a device, which a link may lead to, is not opened:
reading one can wait for ever, have no end, or do something.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from reshard.errors import Problem, ReshardError

MOST = 2 << 30
"""Bytes of a file that is read whole, at most: ten times the metadata of the largest models."""

OnStep = Callable[[str], None]
"""Hears in words what is done next, where that may take long."""

READING = "reading headers"

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class Stamp(NamedTuple):
    """What tells one state of a file from another, as far as the system keeps it."""

    size: int
    modified: int
    inode: int

    @staticmethod
    def of(descriptor: int) -> Stamp:
        """The stamp of an open file: opening it is what makes a file server look."""
        status = os.fstat(descriptor)
        return Stamp(status.st_size, status.st_mtime_ns, status.st_ino)

    def __str__(self) -> str:
        modified = datetime.fromtimestamp(self.modified / 1e9).isoformat(" ", "milliseconds")
        return f"{self.size:,} bytes, modified {modified}, inode {self.inode}"


class _Note(NamedTuple):
    """A file as it was when it was first opened; of one that was read whole, what it said."""

    stamp: Stamp
    digest: bytes | None


class Sources:
    """The files that something is made of. `named` are the paths that led to them."""

    def __init__(self, *named: Path) -> None:
        self.named = named
        self._notes: dict[str, _Note] = {}
        self._on_step: OnStep | None = None

    @property
    def paths(self) -> list[Path]:
        """All that is read, `named` first and then each file, as it was opened."""
        return [*self.named, *map(Path, self._notes)]

    def __or__(self, other: Sources) -> Sources:
        both = Sources(*self.named, *other.named)
        both._notes = {**self._notes, **other._notes}
        return both

    def note(self, path: str, stamp: Stamp, content: bytes | None = None) -> None:
        """Keep the first stamp of a file. What counts of one that is only ever read whole is its `content`."""
        first = self._notes.get(path)
        if first is None and self._on_step:
            self._on_step(f"{READING}: {len(self._notes) + 1} files")
        digest = None if content is None or (first and first.digest is None) else _digest(content)
        self._notes[path] = _Note(first.stamp if first else stamp, digest)

    def as_list(self) -> list[dict[str, Any]]:
        """What was read, for a record: paths below the first of `named`, or else names, with sizes and times."""
        first = str(self.named[0].absolute()) if self.named else ""
        found = []
        for path, note in self._notes.items():
            full = str(Path(path).absolute())
            shown = os.path.relpath(full, first) if full.startswith(first + os.sep) else Path(full).name
            modified = datetime.fromtimestamp(note.stamp.modified / 1e9, timezone.utc)
            found.append({"path": shown, "bytes": note.stamp.size, "modified": modified.isoformat()})
        return sorted(found, key=lambda each: str(each["path"]))

    def digest(self) -> str:
        """A digest of the state in which all files were opened."""
        digest = sha256()
        for path, note in sorted(self._notes.items()):
            state = note.digest or " ".join(map(str, note.stamp)).encode()
            digest.update(os.fsencode(os.path.realpath(path)) + b"\0" + state)
        return digest.hexdigest()

    @contextmanager
    def counted(self, on_step: OnStep) -> Iterator[None]:
        """Let `on_step` hear, while the block opens a checkpoint, how many files it has opened."""
        on_step(READING)
        self._on_step = on_step
        try:
            yield
        finally:
            self._on_step = None

    def changed(self) -> list[Problem]:
        """A problem for each file that is not what it was."""
        return [
            Problem(
                "a source changed while it was read",
                file=path,
                rule="all bytes come from one state of the source",
                expected=str(note.stamp),
                found=found,
                remedy="wait until nothing writes to the source, then run the same command again",
            )
            for path, note in self._notes.items()
            if (found := _otherwise(path, note))
        ]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raise ReshardError with every file that changed until the block ends, whatever else it led to."""
        try:
            yield
        except (ReshardError, OSError) as error:
            if problems := self.changed():
                raise ReshardError(problems) from error
            raise
        if problems := self.changed():
            raise ReshardError(problems)


def _otherwise(path: str, note: _Note) -> str | None:
    """What a file is now, if it is not what it was."""
    try:
        descriptor = _opened(path)
    except OSError as error:
        return error.strerror
    except ReshardError as error:
        return error.problems[0].found
    try:
        stamp = Stamp.of(descriptor)
        if stamp == note.stamp or (note.digest and note.digest == _digest(_whole(descriptor))):
            return None  # a run that goes on may write its config again with every step
        return str(stamp)
    finally:
        os.close(descriptor)


def _digest(content: bytes) -> bytes:
    return sha256(content).digest()


_noting: ContextVar[Sources | None] = ContextVar("noting", default=None)


@contextmanager
def noted(*named: Path) -> Iterator[Sources]:
    """Note all sources that are opened in the block, which begins with the paths `named`."""
    sources = Sources(*named)
    token = _noting.set(sources)
    try:
        yield sources
    finally:
        _noting.reset(token)


def open_source(path: str | Path) -> int:
    """A descriptor for reading a source of which more will be read later.

    Raises OSError, and ReshardError for what is not a regular file.
    """
    descriptor = _opened(path)
    if sources := _noting.get():
        sources.note(str(path), Stamp.of(descriptor))
    return descriptor


def read_source(path: str | Path, most: int = MOST) -> bytes:
    """All bytes of a source, which is not read again.

    Raises OSError, and ReshardError for what is not a regular file, or has more than `most` bytes.
    """
    descriptor = _opened(path)
    try:
        stamp = Stamp.of(descriptor)
        if stamp.size > most:
            raise ReshardError(
                "a file is larger than any of its kind",
                file=str(path),
                expected=f"at most {most:,} bytes",
                found=f"{stamp.size:,} bytes",
                remedy="the file is damaged, or is not what its name says: copy or download it again",
            )
        content = _whole(descriptor)
        if sources := _noting.get():
            sources.note(str(path), stamp, content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)
    return content


def _opened(path: str | Path) -> int:
    """A descriptor for reading a regular file. Anything else is not even opened, and never waited for."""
    kind = stat.S_IFMT(Path(path).stat().st_mode)
    if kind != stat.S_IFREG:
        raise ReshardError(
            "not a regular file",
            file=str(path),
            expected="a file with content of its own, or a link to one",
            found=_KINDS.get(kind, "something else"),
            remedy="copy the checkpoint again, and check what put this in its place",
        )
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def _whole(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        return file.read()
