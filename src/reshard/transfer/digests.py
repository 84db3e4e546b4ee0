"""Digests of files whose bytes arrive in any order.

A file is cut into cells of `CELL_BYTES` bytes, the last of which may be shorter. The digest of the file is the XXH3-128
of the concatenated XXH3-128 digests of its cells, each of 16 bytes with the most significant first.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from threading import Lock

from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from reshard.stores import StorePath, open_file

CELL_BYTES = 256 << 10
DIGEST_BYTES = 16
"""Bytes of one digest."""
DIGEST_NAME = "XXH3-128 of the XXH3-128 digests of each 256 KiB"
UNKNOWN_DIGEST = "0" * 2 * DIGEST_BYTES
"""Stands for an unknown digest."""
READ_BYTES = 16 * CELL_BYTES
"""Bytes read at a time."""


@dataclass
class SeenCells:
    """What was seen of a file: digests of adjacent cells, with the number of the first, and parts of other cells.

    Each of these `rests` is a range of bytes, with its offset in the file.
    """

    cells: list[tuple[int, bytes]] = field(default_factory=list)
    rests: list[tuple[int, bytes]] = field(default_factory=list)


@dataclass
class PartDigests:
    """Digests of parts of a file: of adjacent cells, with the number of the first, and of ranges within other cells.

    A range is (begin, end), with the offsets of its bytes in the file.
    """

    cells: list[tuple[int, bytes]] = field(default_factory=list)
    ranges: dict[tuple[int, int], bytes] = field(default_factory=dict)

    def join(self, more: PartDigests) -> None:
        """Add digests of other parts, or newer ones of the same."""
        self.cells += more.cells
        self.ranges |= more.ranges


class FileDigest:
    """The digest of a file of `size` bytes. Several threads may add different parts."""

    def __init__(self, size: int) -> None:
        self._size = size
        count = -(-size // CELL_BYTES)
        self._digests = bytearray(count * DIGEST_BYTES)
        self._missing = set(range(count))
        self._news: set[int] = set()
        self._parts: dict[int, tuple[bytearray, list[tuple[int, int]]]] = {}
        self._lock = Lock()

    def add(self, data: memoryview, offset: int) -> None:
        """Add the bytes of the file from `offset`. Bytes that are added again must be the same."""
        end = offset + len(data)
        for cell in range(offset // CELL_BYTES, -(-end // CELL_BYTES)):
            first, last = cell * CELL_BYTES, min((cell + 1) * CELL_BYTES, self._size)
            part = data[max(first, offset) - offset : min(last, end) - offset]
            if len(part) == last - first:
                self._set(cell, part)
            else:
                self._add_part(cell, part, max(first, offset) - first, last - first)

    def _set(self, cell: int, content: memoryview | bytearray | bytes) -> None:
        self.know(cell, xxh3_128_digest(content))
        with self._lock:
            self._news.add(cell)

    def know(self, cell: int, digest: bytes) -> None:
        """Set the digest of a complete cell."""
        self._digests[cell * DIGEST_BYTES : (cell + 1) * DIGEST_BYTES] = digest
        with self._lock:
            self._missing.discard(cell)

    def _add_part(self, cell: int, part: memoryview, at: int, size: int) -> None:
        """Keep a part of a cell until the rest of it has been added."""
        with self._lock:
            if cell not in self._missing:
                return
            content, ranges = self._parts.setdefault(cell, (bytearray(size), []))
            content[at : at + len(part)] = part
            ranges.append((at, at + len(part)))
            if _covered(ranges) < size:
                return
            del self._parts[cell]
        self._set(cell, content)

    def patch(self, path: Path, changes: Iterable[tuple[int, bytes]]) -> None:
        """Account for `changes` (offset, bytes) that are about to be written to complete cells of the file at `path`.

        Bytes of the file that are not as they were added, with or without the changes, raise OSError.
        """
        cells: dict[int, list[tuple[int, bytes]]] = {}
        for offset, data in changes:
            for cell in range(offset // CELL_BYTES, (offset + len(data) - 1) // CELL_BYTES + 1):
                cells.setdefault(cell, []).append((offset - cell * CELL_BYTES, data))
        if not cells:
            return
        with open_file(path) as file:
            for cell, inside in cells.items():
                content = file.read(cell * CELL_BYTES, CELL_BYTES)
                if not matches(content, self._of(cell), inside):
                    raise OSError(errno.EIO, "the disk returned other bytes than were written", str(path))
                self._set(cell, changed(content, inside))

    def _of(self, cell: int) -> bytes:
        return bytes(self._digests[cell * DIGEST_BYTES : (cell + 1) * DIGEST_BYTES])

    def news(self) -> PartDigests:
        """The digests of what is known now and was not yet when this was last called."""
        with self._lock:
            cells, self._news = self._news, set()
            ranges = {
                (cell * CELL_BYTES + begin, cell * CELL_BYTES + end): xxh3_128_digest(
                    memoryview(content)[begin:end]
                )
                for cell, (content, parts) in self._parts.items()
                for begin, end in parts
            }
        return PartDigests(list(self._cell_digests(cells)), ranges)

    def _cell_digests(self, cells: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """The digests of cells: those of adjacent ones together, with the number of the first."""
        for first, last in runs(cells):
            yield first, bytes(self._digests[first * DIGEST_BYTES : last * DIGEST_BYTES])

    def seen(self) -> SeenCells:
        """Everything added so far, to be merged into a digest of the same file elsewhere."""
        count = len(self._digests) // DIGEST_BYTES
        seen = SeenCells(list(self._cell_digests(set(range(count)) - self._missing)))
        for cell, (content, ranges) in self._parts.items():
            seen.rests += [(cell * CELL_BYTES + begin, bytes(content[begin:end])) for begin, end in ranges]
        return seen

    def merge(self, seen: SeenCells) -> None:
        """Merge what was added elsewhere, once."""
        for first, digests in seen.cells:
            self._digests[first * DIGEST_BYTES : first * DIGEST_BYTES + len(digests)] = digests
            with self._lock:
                cells = range(first, first + len(digests) // DIGEST_BYTES)
                self._missing.difference_update(cells)
                self._news.update(cells)
        for offset, content in seen.rests:
            self.add(memoryview(content), offset)

    def finish(self) -> str:
        """The digest in hexadecimal, once all bytes were added."""
        if self._missing:
            # Bytes read from the disk would pass for those that were written.
            raise RuntimeError(f"{len(self._missing):,} cells of a file were not added to its digest")
        return str(xxh3_128_hexdigest(self._digests))


def matches(content: bytes, digest: bytes, changes: Iterable[tuple[int, bytes]] = ()) -> bool:
    """Whether bytes have a digest, as they are or before `changes` (offset, bytes) to zeros in them."""
    if xxh3_128_digest(content) == digest:
        return True
    zeros = [(at, bytes(len(data))) for at, data in changes]
    return bool(zeros) and bool(xxh3_128_digest(changed(content, zeros)) == digest)


def changed(content: bytes, changes: Iterable[tuple[int, bytes]]) -> bytes:
    """`content` with other bytes at some offsets, which may be partly outside of it."""
    result = bytearray(content)
    for at, data in changes:
        first, last = max(at, 0), min(at + len(data), len(result))
        if first < last:
            result[first:last] = data[first - at : last - at]
    return bytes(result)


def _covered(ranges: Iterable[tuple[int, int]]) -> int:
    """How many bytes are in at least one range."""
    count = end = 0
    for first, last in sorted(ranges):
        count += max(last - max(first, end), 0)
        end = max(end, last)
    return count


def runs(cells: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Ranges (first, end) of adjacent numbers."""
    for _, group in groupby(enumerate(sorted(cells)), lambda each: each[1] - each[0]):
        numbers = [number for _, number in group]
        yield numbers[0], numbers[-1] + 1


def digest_of(
    path: Path,
    is_stopped: Callable[[], bool] = lambda: False,
    on_bytes: Callable[[int], None] = lambda count: None,
    *,
    from_disk: bool = True,
) -> str:
    """The digest of the bytes of a file; `from_disk` bypasses the page cache, if the system allows it.

    Raises OSError, and ReshardError for what a store refuses.
    """
    if from_disk and not isinstance(path, StorePath):
        _leave_cache(path)
    with open_file(path) as file:
        size = file.size
        digest, buffer = FileDigest(size), memoryview(bytearray(min(READ_BYTES, size)))
        for offset in range(0, size, READ_BYTES):
            part = buffer[: min(READ_BYTES, size - offset)]
            if is_stopped() or file.fill([(offset, part)]) is not None:
                return UNKNOWN_DIGEST
            digest.add(part, offset)
            on_bytes(len(part))
        return digest.finish()


def _leave_cache(path: Path) -> None:
    """Ask the system to read a file from disk instead of the page cache."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
