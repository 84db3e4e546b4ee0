"""What has passed of each source: CRC32s of ranges of its bytes, combined in whatever order the ranges come.

A file's ranges are disjoint and in order, and those that touch are joined, so a file that has passed as a whole is one
range: its checksum is the CRC32 that any other tool computes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from threading import Lock
from typing import TYPE_CHECKING

from isal.isal_zlib import crc32, crc32_combine

from reshard.algebra.storage import Storage

if TYPE_CHECKING:
    from reshard.transfer.gather import Files

Range = tuple[int, int, int]
"""Bytes `begin` to `end` of a file, and their CRC32."""

Passed = dict[str, list[Range]]
"""The ranges of each file, by its path."""

LITTLE = 1 << 20
"""Bytes of a file that are read for its checksum alone, if no tensor needed them: headers, alignment, padding."""

SHARE = 64
"""The same as a share of the file: one in so many, where that is more."""

SPAN = 2 << 20
"""Bytes that are read at a time, few enough for the cache of a core."""


NEVER = 1 << 62

CELL = 256 << 10
"""Workers keep a checksum of each so many bytes of a source. Two may read the same bytes; the checksum of a range that
overlaps another in part is of no use."""


def add(ranges: list[Range], begin: int, end: int, value: int, apart: int = NEVER) -> bool:
    """Put a range among others, joined with those that touch it unless at a multiple of `apart`.

    False if some of its bytes are there already.
    """
    place = bisect_left(ranges, (begin,))
    before = ranges[place - 1] if place else None
    after = ranges[place] if place < len(ranges) else None
    if (before and before[1] > begin) or (after and after[0] < end):
        return False
    first = last = place
    if before and before[1] == begin and begin % apart:
        begin, value = before[0], crc32_combine(before[2], value, end - begin)
        first -= 1
    if after and after[0] == end and end % apart:
        value, end = crc32_combine(value, after[2], after[1] - end), after[1]
        last += 1
    ranges[first:last] = [(begin, end, value)]
    return True


def join(passed: Passed, more: Mapping[str, Iterable[Range]]) -> None:
    """Put ranges of files among others."""
    for path, ranges in more.items():
        for begin, end, value in ranges:
            add(passed.setdefault(path, []), begin, end, value)


def missing(ranges: list[Range], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts of bytes `begin` to `end` that are in no range."""
    place = max(bisect_left(ranges, (begin,)) - 1, 0)
    while begin < end and place < len(ranges):
        first, last, _ = ranges[place]
        if begin < first:
            yield begin, min(first, end)
        begin = max(begin, last)
        place += 1
    if begin < end:
        yield begin, end


def checksum(ranges: Iterable[Range]) -> int:
    """The CRC32 of ranges, one after another."""
    total = 0
    for begin, end, value in ranges:
        total = crc32_combine(total, value, end - begin)
    return total


class Ledger:
    """What passed of those storages that recorded a CRC32 or, with `every`, of all. `passed` did so in an earlier run.

    Bytes that are read more than once count once, when they pass first. Ranges end at each multiple of `apart`.
    """

    def __init__(
        self,
        *,
        every: bool = False,
        passed: Mapping[str, Iterable[Range]] | None = None,
        apart: int = NEVER,
    ) -> None:
        self._apart = apart
        self.passed: Passed = {path: list(ranges) for path, ranges in (passed or {}).items()}
        self._every = every
        self._touched: set[Storage] = set()
        self._lock = Lock()

    def counts(self, storage: Storage) -> bool:
        """Whether bytes of a storage are noted."""
        return self._every or storage.crc32 is not None

    def record(self, storage: Storage, begin: int, data: memoryview) -> list[Range]:
        """Note that bytes `begin` and on of `storage` were `data`. Returns what was new, by its place in the file."""
        if not self.counts(storage):
            return []
        begin += storage.offset
        with self._lock:
            if storage.crc32 is not None:
                self._touched.add(storage)
            ranges = self.passed.setdefault(storage.path, [])
            parts = list(missing(ranges, begin, begin + len(data)))
        parts = [piece for first, last in parts for piece in _cells(first, last, self._apart)]
        found = [(first, last, crc32(data[first - begin : last - begin])) for first, last in parts]
        with self._lock:  # another thread may have noted the same meanwhile
            return [part for part in found if add(ranges, *part, self._apart)]

    def merge(self, files: Files, more: Mapping[str, Iterable[Range]]) -> Passed:
        """Take in what has passed elsewhere; of ranges of which a part is here already, the rest is read again.

        Returns what was new.
        """
        new: Passed = {}
        for path, found in more.items():
            ranges = self.passed.setdefault(path, [])
            for begin, end, value in found:
                if list(missing(ranges, begin, end)) == [(begin, end)]:
                    add(ranges, begin, end, value)
                    fresh = [(begin, end, value)]
                else:
                    fresh = self._read(files, path, begin, end)
                for each in fresh:
                    add(new.setdefault(path, []), *each)
        return new

    def touch(self, storage: Storage) -> None:
        """Have a storage checked at the end, of which an earlier run has taken something."""
        if storage.crc32 is not None:
            with self._lock:
                self._touched.add(storage)

    def is_right(self, storage: Storage) -> bool:
        """Whether all bytes of a storage have passed, and are those that were recorded."""
        with self._lock:
            return self._checksum(storage) == storage.crc32

    def _checksum(self, storage: Storage) -> int | None:
        """The CRC32 of a storage; None unless it is made of whole ranges."""
        begin, end = storage.offset, storage.offset + storage.nbytes
        ranges = self.passed.get(storage.path, [])
        inside = ranges[bisect_left(ranges, (begin,)) : bisect_left(ranges, (end,))]
        is_whole = sum(last - first for first, last, _ in inside) == storage.nbytes
        return checksum(inside) if is_whole and (not inside or inside[-1][1] == end) else None

    def settle(self, files: Files) -> list[Storage]:
        """Read what did not pass of each storage that was touched, and return those whose CRC32 is wrong."""
        wrong = []
        for storage in self._touched:
            self._read(files, storage.path, storage.offset, storage.offset + storage.nbytes)
            found = self._checksum(storage)
            if found is None:  # it lies in a larger range
                apart = Ledger()
                apart._read(files, storage.path, storage.offset, storage.offset + storage.nbytes)
                found = apart._checksum(storage)
            if found != storage.crc32:
                wrong.append(storage)
        return wrong

    def complete(self, files: Files, sizes: Mapping[str, int]) -> None:
        """Read what did not pass of each file, where that is little. `sizes` are those of the files, in bytes."""
        for path, size in sizes.items():
            left = size - sum(end - begin for begin, end, _ in self.passed.get(path, []))
            if 0 < left <= max(LITTLE, size // SHARE):
                self._read(files, path, 0, size)

    def _read(self, files: Files, path: str, begin: int, end: int) -> list[Range]:
        """Let those bytes of a file pass that have not, and return their ranges."""
        ranges = self.passed.setdefault(path, [])
        found: list[Range] = []
        for batch in _batches(list(missing(ranges, begin, end)), min(SPAN, end - begin)):
            files.read(path, batch)
            found += [(start, start + len(part), crc32(part)) for start, part in batch]
        for each in found:
            add(ranges, *each)
        return found


def _batches(gaps: Iterable[tuple[int, int]], size: int) -> Iterator[list[tuple[int, memoryview]]]:
    """Where to read bytes of gaps, `size` bytes at a time: a store far away is asked for many gaps at once."""
    room, used = memoryview(bytearray(size)), 0
    batch: list[tuple[int, memoryview]] = []
    for first, last in gaps:
        for start in range(first, last, size):
            count = min(size, last - start)
            if used + count > size:
                yield batch
                batch, used = [], 0
            batch.append((start, room[used : used + count]))
            used += count
    if batch:
        yield batch


def _cells(begin: int, end: int, apart: int) -> Iterator[tuple[int, int]]:
    """Bytes `begin` to `end`, cut at each multiple of `apart`."""
    while begin < end:
        last = min(end, begin - begin % apart + apart)
        yield begin, last
        begin = last
