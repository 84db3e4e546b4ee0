"""The journal: what an unfinished conversion has on disk already, so that the same command can continue it.

A journal is a file of lines that is only appended to. Each line begins with the CRC32 of the rest: a line that a crash
cut short ends the journal, and everything after it is ignored. The first line says what the output is made of; each
other line names bytes that were written before, if not yet on disk: the next run compares them with their digests.
"""

from __future__ import annotations

import json
import os
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from zlib import crc32

from reshard.algebra.storage import Storage
from reshard.base.errors import UNUSABLE, ReshardError
from reshard.stores import OpenFile, open_file
from reshard.transfer.digests import PartDigests
from reshard.transfer.ledger import Passed, join
from reshard.transfer.sink import allocate
from reshard.transfer.source_files import Seals, Sources
from reshard.transfer.written_file import WrittenFile

RESERVED_BYTES = 1 << 20
"""Bytes allocated on disk ahead of the journal's end, so that progress can still be recorded when the disk is full."""

FLUSH_BYTES = 256 << 20
"""Most bytes of a file that are lost when the machine fails: it flushes this often."""

FLUSH_RANGES = 1 << 14
"""Number of source ranges after which they are recorded, for tensors with short rows: until then they take memory."""

SOURCE_CHANGED = "the source has changed since"

READ_BYTES = 1 << 20
"""Bytes of a journal read at a time."""

SUMS_PREFIX = '{"sums":'
"""How a line with digests begins."""


class OutputIdentity(NamedTuple):
    """Digests of everything that determines the bytes of an output: the program, its sources, and its options."""

    version: str
    sources: str
    options: str

    @property
    def name(self) -> str:
        """Eight hexadecimal digits for a folder name."""
        return f"{crc32(' '.join(self).encode()):08x}"

    @property
    def digest(self) -> str:
        """One digest of all three."""
        return sha256(" ".join(self).encode()).hexdigest()

    def why_not(self, other: OutputIdentity) -> str:
        """Why the work of a run with identity `other` cannot be reused here."""
        if self.version != other.version:
            return "another version of reshard wrote it"
        if self.sources != other.sources:
            return SOURCE_CHANGED
        return "it has other options"

    def differs(self, other: OutputIdentity) -> str:
        """How this identity differs from `other`."""
        causes = {"version": "other code", "sources": "other files", "options": "other options or sizes"}
        return ", ".join(causes[name] for name in causes if getattr(self, name) != getattr(other, name))


@dataclass
class JournalContent:
    """Everything that a journal records.

    `identity` and `facts` are those that it was begun with, the former None if it is empty; `end` is the offset after
    its last complete line. `sums` are digests of parts of files that are not complete. `unchecked` are storages with a
    checksum that finished blocks read only in part, each with the name of a tensor in it. `passed` are the ranges of
    the sources that the files were made from; `is_untold` says that it lacks some. `equal` says that tensors that are
    stored more than once were compared and found equal.
    """

    identity: OutputIdentity | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    end: int = 0
    equal: bool = False
    files: dict[str, WrittenFile] = field(default_factory=dict)
    sums: dict[str, PartDigests] = field(default_factory=dict)
    unchecked: dict[Storage, str] = field(default_factory=dict)
    passed: Passed = field(default_factory=dict)
    seals: Seals = field(default_factory=dict)
    is_untold: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the output that are written."""
        return sum(written.nbytes for written in self.files.values())

    @property
    def uploaded(self) -> int:
        """Bytes of the output that are uploaded."""
        return sum(written.nbytes for written in self.files.values() if written.elsewhere is not None)

    def apply(self, entry: Mapping[str, Any]) -> None:
        """Apply one line. Raises one of `UNUSABLE` if it is malformed."""
        if self.identity is None:
            self.identity = OutputIdentity(*(str(entry[key]) for key in OutputIdentity._fields))
            self.facts = entry
            return
        self.equal = self.equal or entry.get("replicas") == "equal"
        if "seals" in entry:
            self.equal = False  # what was compared may have changed, and only what was used is checked again
            self.seals = {
                real: (int(when), str(path), ranges) for real, (when, path, ranges) in entry["seals"].items()
            }
        if "sums" in entry:
            self.sums.setdefault(entry["sums"], PartDigests()).join(_sums_of(entry))
        if "file" in entry:
            self._replace(entry["file"], WrittenFile.of_entry(entry["written"]))
        for name, *place in entry.get("unchecked", ()):
            self.unchecked[Storage(*place)] = name
        for place in entry.get("checked", ()):
            self.unchecked.pop(Storage(*place), None)
        join(self.passed, entry.get("passed", {}))

    def _replace(self, path: str, written: WrittenFile) -> None:
        """Replace the record of a file. If less is written than before, what that was made from is unknown."""
        if written.nbytes < self.files.get(path, WrittenFile()).nbytes:
            self.is_untold = True
            self.passed.clear()
        self.files.pop(path, None)
        if written.nbytes or written.is_whole:
            self.files[path] = written
        if written.is_whole or not written.nbytes:
            self.sums.pop(path, None)


class Journal:
    """The journal of one conversion. Before it is opened, nothing is known, and additions are discarded.

    `facts` are for whoever finds the journal: the command that continues it, and the total number of bytes.
    If the run does not wait for the disk, nothing is `durable`: bytes may be lost that the journal names.
    """

    def __init__(
        self,
        identity: OutputIdentity | None = None,
        facts: Mapping[str, Any] | None = None,
        *,
        sources: Sources | None = None,
        durable: bool = True,
    ) -> None:
        self._sources = sources or Sources()
        self.identity = identity
        self.durable = durable
        self.progress = JournalContent()
        self.facts = dict(facts or {})
        self._path = Path()
        self._descriptor: int | None = None
        self._reserved = 0
        self._lock = Lock()
        self._loose = 0

    @property
    def text(self) -> str:
        """All lines so far, except for digests of files that are not complete."""
        if not self.is_open:
            return ""
        lines = self._path.read_bytes()[: self.progress.end].decode().splitlines(keepends=True)
        return "".join(line for line in lines if line[9 : 9 + len(SUMS_PREFIX)] != SUMS_PREFIX)

    @property
    def is_open(self) -> bool:
        """Whether additions are kept."""
        return self._descriptor is not None

    def open(self, path: Path, folder: Path, sizes: Mapping[str, int], elsewhere: Mapping[str, str]) -> int:
        """Read a journal that was begun for the same output; any other one is replaced by a new one.

        Returns how many bytes of the output are given up because a source has changed, although its size and time have
        not.

        Files that are not in `folder` as the journal records, with their `sizes`, will be written anew, unless they
        were uploaded and their state is still that in `elsewhere`.
        """
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        self.progress = read_journal(path)
        if self.progress.identity != self.identity:
            self.progress = JournalContent()
        given_up = 0
        if not self._are_same_sources():
            given_up, self.progress = self.progress.nbytes, JournalContent()
        if os.fstat(self._descriptor).st_size > self.progress.end:  # otherwise it keeps its modification time
            os.ftruncate(self._descriptor, self.progress.end)
        if self.progress.identity is None and self.identity:
            self._append({**self.facts, **self.identity._asdict()})
        if _times(self.progress.seals) != _times(seals := self._sources.seals()):
            self.add({"seals": seals})
        gone = [
            name
            for name, written in self.progress.files.items()
            if (
                elsewhere.get(name) != written.elsewhere
                if written.elsewhere is not None
                else not written.is_at(folder / name, sizes.get(name, -1))
            )
        ]
        for name in gone:
            self.record(name, WrittenFile())
        if gone:
            self._sync()  # before a file of that name exists again
        return given_up

    def _are_same_sources(self) -> bool:
        """Whether the sources are those that the earlier run has read; only their names and times were compared."""
        seals = self.progress.seals
        if not seals or _times(seals) == _times(self._sources.seals()):
            return True
        has_all = bool(self.progress.passed) and not self.progress.is_untold
        return has_all and self._sources.still(seals, self.progress.passed)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Append a line."""
        if self.is_open:
            with self._lock:
                self._append(entry)

    def record(self, path: str, written: WrittenFile, sums: PartDigests | None = None, **read: Any) -> None:
        """Record what is on disk of a file now, new digests of its parts, and what was `read` for it."""
        if not self.is_open:
            return
        with self._lock:
            before = self.progress.files.get(path, WrittenFile())
            if sums:  # a reader needs them before the bytes, and there is no second copy
                self._write(_sums_entry(path, sums))
            self._append({"file": path, "written": written.as_entry(), **read})
            self._loose += written.nbytes - before.nbytes
            if self._loose >= FLUSH_BYTES:
                self._sync()
                self._loose = 0

    def _append(self, entry: Mapping[str, Any]) -> None:
        """Write a line and apply it. The ledger keeps the ranges that were read: there can be millions."""
        passed = entry.get("passed", {})
        self._write({**entry, "passed": {path: ranges.as_list() for path, ranges in passed.items()}})
        self.progress.apply({**entry, "passed": {}})

    def _write(self, entry: Mapping[str, Any]) -> None:
        """Append a complete line or nothing: lines after one that is cut short would be ignored."""
        assert self._descriptor is not None
        text = json.dumps(entry, separators=(",", ":"))
        line = f"{crc32(text.encode()):08x} {text}\n".encode()
        if (
            self.progress.end + RESERVED_BYTES // 2 > self._reserved
        ):  # space on the disk, if it can be reserved
            allocate(self._descriptor, self.progress.end, RESERVED_BYTES)
            self._reserved = self.progress.end + RESERVED_BYTES
        count = 0
        try:
            while count < len(line):
                count += os.write(self._descriptor, line[count:])
        except OSError:
            if count:
                os.ftruncate(self._descriptor, self.progress.end)
            raise
        self.progress.end += len(line)

    def _sync(self) -> None:
        """Make the recorded lines survive a failure of the machine."""
        assert self._descriptor is not None
        if self.durable:
            os.fsync(self._descriptor)
        for folder in (self._path.parent, self._path.parent.parent):
            self.sync(folder)

    def sync(self, path: Path) -> None:
        """Wait until a file, or a folder with its list of names, is on disk, if the journal is durable."""
        if self.durable:
            _sync(path)

    def close(self) -> None:
        """Close the journal; later additions are discarded."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_journal(path: Path) -> JournalContent:
    """What a journal records, up to the first line that is damaged. Raises OSError if it exists but cannot be read."""
    try:
        with open_file(path) as file:
            return parsed_journal(_lines(file))
    except (FileNotFoundError, ReshardError):
        return JournalContent()


def _lines(file: OpenFile) -> Iterator[bytes]:
    """The lines of a file with their ends, one by one: a journal can contain millions of ranges."""
    place, rest = 0, b""
    while content := file.read(place, READ_BYTES):
        place += len(content)
        *lines, rest = (rest + content).split(b"\n")
        yield from (line + b"\n" for line in lines)
    yield rest


def parsed_journal(lines: Iterable[bytes]) -> JournalContent:
    """The same for the lines of a journal, with their ends."""
    content = JournalContent()
    for line in lines:
        checksum, text = line[:8], line[9:-1]
        if not line.endswith(b"\n") or checksum != b"%08x" % crc32(text):
            break
        try:
            content.apply(json.loads(text))
        except UNUSABLE:
            break
        content.end += len(line)
    return content


def _times(seals: Seals) -> dict[str, int]:
    return {real: when for real, (when, _, _) in seals.items()}


def _sums_entry(path: str, sums: PartDigests) -> dict[str, Any]:
    """The line of a journal for the digests of parts of a file."""
    cells = [(first, b64encode(digests).decode()) for first, digests in sums.cells]
    ranges = [(*place, b64encode(digest).decode()) for place, digest in sums.ranges.items()]
    return {"sums": path, "cells": cells, "ranges": ranges}


def _sums_of(entry: Mapping[str, Any]) -> PartDigests:
    cells = [(int(first), b64decode(digests)) for first, digests in entry["cells"]]
    return PartDigests(
        cells, {(int(begin), int(end)): b64decode(digest) for begin, end, digest in entry["ranges"]}
    )


def as_entry(storage: Storage) -> list[Any]:
    """A storage as the journal stores it."""
    return [storage.path, storage.offset, storage.nbytes, storage.crc32]
