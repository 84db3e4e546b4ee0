"""Sources: only regular files, recorded when they are opened, so that a change during the run is detected.

Headers are read long before the tensors that they describe. A file that is rewritten, truncated or zeroed meanwhile
may still be read to its end, into a model that never existed. A FIFO or a device, which a link may point to, is not
opened: reading one can block forever, never end, or have side effects.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from isal.isal_zlib import crc32

from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.stores import (
    OpenFile,
    Stamp,
    as_path,
    homes_of,
    is_remote,
    open_file,
    realpath,
    refresh,
)
from reshard.transfer.ledger import ByteRanges, Passed, Range
from reshard.transfer.thread_files import unreadable

if TYPE_CHECKING:  # it imports numpy
    from reshard.transfer.memory_budget import MemoryMeter

MAX_FILE_BYTES = 2 << 30
"""Most bytes of a file that is read completely: ten times the metadata of the largest models."""

WINDOW_BYTES = 1 << 20
"""Bytes that `windows` reads at a time."""

OnStep = Callable[[str], None]
"""Callback that receives a description of the next step, if that may take long."""

READING_HEADERS = "reading headers"


@dataclass
class _FileRecord:
    """A file as it was when first opened; for one that was read completely, the digest and CRC32 of its content.

    `ranges` are those that were read to open it.
    """

    stamp: Stamp
    digest: bytes | None = None
    crc32: int = 0
    ranges: ByteRanges = field(default_factory=ByteRanges)


Seals = Mapping[str, tuple[int, str, Sequence[Range] | None]]
"""For the real path of each file, when it last changed, and as what path and in which ranges it was read to open it."""


class Sources:
    """The files that something is made from. `named` are the paths that led to them.

    Whatever reads a checkpoint and its companions opens them here, within the limit of `meter`, if there is one.
    """

    def __init__(self, *named: Path, meter: MemoryMeter | None = None) -> None:
        self.named = named
        self.meter = meter
        self._notes: dict[str, _FileRecord] = {}
        self._on_step: OnStep | None = None

    @property
    def paths(self) -> list[Path]:
        """All paths that are read: `named` first, then each file with the path that opened it."""
        return [*self.named, *map(as_path, self._notes)]

    def open(self, path: str | Path) -> OpenFile:
        """A file opened to read more of it later.

        Raises OSError, and ReshardError for anything but a regular file.
        """
        file = open_file(path)
        return _RecordedFile(file, self._note(str(path), file.stamp()))

    def read(self, path: str | Path, most: int = MAX_FILE_BYTES, weight: int = 1) -> bytes:
        """All bytes of a file that is not read again. Each takes `weight` bytes of memory, with what is made from it.

        Raises OSError, and ReshardError for anything but a regular file, if it has more than `most` bytes, or if it
        does not fit in the memory limit.
        """
        with open_file(path) as file:
            stamp = file.stamp()
            if stamp.size > most:
                raise ReshardError(
                    "file-too-large",
                    "a file is implausibly large",
                    file=str(path),
                    expected=f"at most {most:,} bytes",
                    found=f"{stamp.size:,} bytes",
                    remedy="the file is damaged, or is not what its name says: copy or download it again",
                )
            if self.meter:
                self.meter.expect(weight * stamp.size, str(path))
            content = file.read(0, stamp.size)
            self._note(str(path), stamp, content)
        return content

    def fits(self, nbytes: int) -> bool:
        """Whether `nbytes` more bytes are within the memory limit."""
        return self.meter is None or self.meter.fits(nbytes)

    def _note(self, path: str, stamp: Stamp, content: bytes | None = None) -> ByteRanges:
        """Record the first stamp of a file. If a file is only ever read completely, only its `content` counts.

        Returns the ranges of the file that were read to open it, to which more may be added.
        """
        first = self._notes.get(path)
        if first is None and self._on_step:
            self._on_step(f"{READING_HEADERS}: {len(self._notes) + 1} files")
        stamp = first.stamp if first else stamp
        ranges = first.ranges if first else ByteRanges()
        if content is None or (first and first.digest is None):
            self._notes[path] = first if first and first.digest is None else _FileRecord(stamp, ranges=ranges)
        else:
            self._notes[path] = _FileRecord(stamp, _digest([content]), crc32(content), ranges)
        return ranges

    def only(self, paths: Collection[str]) -> Sources:
        """The same sources, restricted to the files in `paths`."""
        some = Sources(*self.named)
        some._notes = {path: self._notes[path] for path in paths if path in self._notes}
        return some

    def sizes(self) -> dict[str, int]:
        """Bytes of each file that was not read completely when it was opened, by path."""
        return {path: note.stamp.size for path, note in self._notes.items() if note.digest is None}

    def as_list(self, passed: Passed | None = None) -> list[dict[str, Any]]:
        """What was read, for a record: paths relative to the first of `named`, or else names, with sizes and times.

        With `passed`, also how many bytes of each were read, and their CRC32; `ranges` (begin and end) if not all were
        read.
        """
        first = self.named[0].absolute() if self.named else None
        homes = homes_of(first) if first else ()
        entries = []
        for path, note in self._notes.items():
            full = as_path(path).absolute()
            home = next((home for home in homes if home in full.parents), full.parent)
            relative = full.relative_to(home).as_posix()
            read = {} if passed is None else _as_read(note, passed.get(path, ByteRanges()))
            entries.append({"path": relative, **note.stamp.as_dict(), **read})
        return sorted(entries, key=lambda each: str(each["path"]))

    def digest(self, *, inodes: bool = True) -> str:
        """A digest of the state in which all files were opened, with or without their `inodes`."""
        digest = sha256()
        for path, note in sorted(self._notes.items()):
            stamp = note.stamp[:3] if inodes or isinstance(note.stamp.identity, str) else note.stamp[:2]
            state = note.digest or " ".join(map(str, stamp)).encode()
            digest.update(os.fsencode(realpath(as_path(path))) + b"\0" + state)
        return digest.hexdigest()

    def seals(self) -> Seals:
        """What `still` needs to tell whether files changed. The digest covers those that were read completely."""
        return {
            str(realpath(as_path(path))): (note.stamp.changed, path, note.ranges.as_list())
            for path, note in self._notes.items()
            if note.digest is None
        }

    def still(self, seals: Seals, passed: Passed) -> bool:
        """Whether all files are as an earlier run with the same `digest` read them.

        If a file has changed in some way since, the bytes that this run read, and `passed`, must have their CRC32s.
        Raises OSError if it cannot be read.
        """
        now = self.seals()
        for real, (changed, path, ranges) in seals.items():
            if real in now and now[real][0] == changed:
                continue
            with open_file(real) as file:
                summed = (ByteRanges(ranges), passed.get(path, ByteRanges()))
                if not all(_has_checksums(file, each) for each in summed):
                    return False
        return True

    @contextmanager
    def counted(self, on_step: OnStep) -> Iterator[None]:
        """Report to `on_step`, while the block opens a checkpoint, how many files it has opened."""
        on_step(READING_HEADERS)
        self._on_step = on_step
        try:
            yield
        finally:
            self._on_step = None

    def changed(self, passed: Passed | None = None) -> list[Problem]:
        """A problem for each file that has changed since it was opened.

        `passed` are the CRC32s of what was read since; None without checksums.
        """
        refresh(filter(is_remote, self._notes))
        return [
            _changed(path, note.stamp, state)
            for path, note in self._notes.items()
            if (state := self._otherwise(path, note, passed))
        ]

    def reopened(self, path: str) -> OpenFile:
        """A file that was opened before, to read more of it. Raises OSError, and ReshardError if it has changed."""
        file = open_file(path)
        self.check_unchanged(path, file)
        return file

    def check_unchanged(self, path: str, file: OpenFile) -> None:
        """Raise ReshardError if an open file is not as it was when it was first opened."""
        if (stamp := file.stamp()) != self._notes[path].stamp:
            raise ReshardError([_changed(path, self._notes[path].stamp, str(stamp))])

    def _otherwise(self, path: str, note: _FileRecord, passed: Passed | None) -> str | None:
        """The state of a file now, if it has changed. Raises ReshardError if the system does not show it.

        A run that fails for that reason can be continued, and one whose source is another one cannot.
        """
        try:
            return self._compare_note(path, note, passed)
        except (FileNotFoundError, NotADirectoryError) as error:
            return error.strerror
        except OSError as error:
            raise unreadable(path, error) from error

    @staticmethod
    def _compare_note(path: str, note: _FileRecord, passed: Passed | None) -> str | None:
        """The same.

        A file of which only the time of its last change is another one may have got a new name, or other bytes with
        the old modification time: what was read of it must have its CRC32s.
        """
        try:
            file = open_file(path)
        except ReshardError as error:
            if is_remote(path):
                raise
            return error.problems[0].found
        with file:
            stamp = file.stamp()
            if stamp == note.stamp or (note.digest and note.digest == _digest(windows(file))):
                return None  # a training run may write the same config again at every step
            if stamp[:3] != note.stamp[:3]:
                return str(stamp)
            if note.digest:
                return "other bytes"
            if passed is None:
                return "changed since, with the same size and time"
            if not (
                _has_checksums(file, note.ranges) and _has_checksums(file, passed.get(path, ByteRanges()))
            ):
                return "other bytes"
            note.stamp = stamp
            return None

    @contextmanager
    def unchanged(self, passed: Passed | None) -> Iterator[None]:
        """Raise ReshardError with every file that changed before the end of the block, even if the block fails.

        `passed` are the CRC32s of what the block reads, as for `changed`.
        """
        try:
            yield
        except (ReshardError, OSError):
            problems = []
            with suppress(ReshardError):  # if a store does not answer, `error` reports it
                problems = self.changed(passed)
            if problems:
                raise ReshardError(problems) from None  # it will not pass: nothing is kept to continue from
            raise
        raise_all(self.changed(passed))


def _changed(path: str, before: Stamp, now: str) -> Problem:
    return Problem(
        "source-changed",
        "a source changed while it was read",
        file=path,
        rule="the source must not change during the run",
        expected=str(before),
        found=now,
        remedy="wait until nothing writes to the source any more, then run the same command again",
    )


def _as_read(note: _FileRecord, ranges: ByteRanges) -> dict[str, Any]:
    """What was read of a file; empty if there were too many ranges to keep them."""
    size = note.stamp.size
    if note.digest is not None:
        ranges = ByteRanges([(0, size, note.crc32)])
    if ranges.lost:
        return {}
    entry: dict[str, Any] = {"read": ranges.nbytes, "crc32": f"{ranges.checksum():08x}"}
    return entry if ranges.nbytes == size else {**entry, "ranges": [[begin, end] for begin, end, _ in ranges]}


def _has_checksums(file: OpenFile, ranges: ByteRanges) -> bool:
    """Whether all ranges of a file have their CRC32s."""
    if ranges.lost:
        return False
    for begin, end, expected in ranges:
        checksum = 0
        for at in range(begin, end, WINDOW_BYTES):
            checksum = crc32(file.read(at, min(WINDOW_BYTES, end - at)), checksum)
        if checksum != expected:
            return False
    return True


def _digest(parts: Iterable[bytes]) -> bytes:
    digest = sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def windows(file: OpenFile) -> Iterator[bytes]:
    """All bytes of a file, `WINDOW_BYTES` at a time."""
    at = 0
    while part := file.read(at, WINDOW_BYTES):
        yield part
        at += len(part)


class _RecordedFile(OpenFile):
    """A file that keeps the CRC32s of what is read of it in `ranges`."""

    def __init__(self, file: OpenFile, ranges: ByteRanges) -> None:
        self._file, self._ranges = file, ranges

    def stamp(self) -> Stamp:
        return self._file.stamp()

    def read(self, at: int, count: int) -> bytes:
        content = self._file.read(at, count)
        self._add(at, memoryview(content))
        return content

    def fill(self, parts: Iterable[tuple[int, memoryview]]) -> int | None:
        parts = list(parts)
        end = self._file.fill(parts)
        for at, out in parts if end is None else ():
            self._add(at, out)
        return end

    def _add(self, at: int, data: memoryview) -> None:
        with _adding:
            for begin, end in list(self._ranges.gaps(at, at + len(data))):
                self._ranges.add(begin, end, crc32(data[begin - at : end - at]))

    def close(self) -> None:
        self._file.close()


_adding = Lock()
