"""The ledger: CRC32s of the byte ranges read from each source, combined in any order.

A file's ranges are disjoint and sorted, and adjacent ones are joined, so a file that was read completely is one range:
its checksum is the CRC32 that any other tool computes. Until then there can be millions: a rank that takes an eighth of
each row reads every row of its tensors separately.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from threading import Lock

from isal.isal_zlib import crc32, crc32_combine

from reshard.algebra.storage import Storage
from reshard.transfer.thread_files import OpenFiles

Range = tuple[int, int, int]
"""Bytes `begin` to `end` of a file, and their CRC32."""

BYTES_PER_RANGE = 20
"""Bytes that a range takes in memory."""

MAX_UNREAD_BYTES = 1 << 20
"""Most unread bytes of a file that are read only for its checksum: headers, alignment, padding."""

MAX_UNREAD_DIVISOR = 64
"""The same limit as a fraction of the file, 1/MAX_UNREAD_DIVISOR, if that is more."""

READ_BYTES = 2 << 20
"""Bytes read at a time: small enough for the cache of a core."""


MAX_RANGES = 1 << 21
"""Default for the number of ranges that are kept."""

NEVER = 1 << 62

CELL_BYTES = 256 << 10
"""Workers keep one checksum per cell of this many bytes of a source. Two may read the same bytes; the checksum of a
range that overlaps another in part cannot be used."""


class ByteRanges:
    """Sorted, disjoint ranges of a file, in 20 bytes each. Adjacent ones are joined.

    A file may be read in more ranges than can be kept. They are then `lost` for good: no ranges are stored.
    """

    __slots__ = ("_begins", "_ends", "_values", "lost")

    def __init__(self, ranges: Iterable[Range] | None = ()) -> None:
        """`ranges` must not overlap; None if they are lost."""
        self._begins, self._ends, self._values = array("Q"), array("Q"), array("I")
        self.lost = ranges is None
        for each in ranges or ():
            self.add(*each)

    def __iter__(self) -> Iterator[Range]:
        return zip(self._begins, self._ends, self._values, strict=True)

    def __len__(self) -> int:
        return len(self._begins)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByteRanges) and (self.lost, *self) == (other.lost, *other)

    def add(self, begin: int, end: int, value: int, boundary: int = NEVER) -> bool:
        """Insert a range, and join it with adjacent ones unless they touch at a multiple of `boundary`.

        Returns False if some of its bytes are there already, or if the ranges are lost.
        """
        begins, ends, values = self._begins, self._ends, self._values
        first = last = bisect_left(begins, begin)
        if self.lost or (first and ends[first - 1] > begin) or (last < len(begins) and begins[last] < end):
            return False
        if first and ends[first - 1] == begin and begin % boundary:
            first -= 1
            begin, value = begins[first], crc32_combine(values[first], value, end - begin)
        if last < len(begins) and begins[last] == end and end % boundary:
            value, end = crc32_combine(value, values[last], ends[last] - end), ends[last]
            last += 1
        for column, each in ((begins, begin), (ends, end), (values, value)):
            if first == last:
                column.insert(first, each)
            else:
                column[first] = each
                del column[first + 1 : last]
        return True

    def gaps(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts of bytes `begin` to `end` that are in no range."""
        place = max(bisect_left(self._begins, begin) - 1, 0)
        while begin < end and place < len(self):
            first, last = self._begins[place], self._ends[place]
            if begin < first:
                yield begin, min(first, end)
            begin = max(begin, last)
            place += 1
        if begin < end:
            yield begin, end

    def within(self, begin: int, end: int) -> Iterator[Range]:
        """The ranges that begin in bytes `begin` to `end`."""
        places = range(bisect_left(self._begins, begin), bisect_left(self._begins, end))
        return ((self._begins[i], self._ends[i], self._values[i]) for i in places)

    def unknown(self, others: Iterable[Range]) -> tuple[list[Range], list[tuple[int, int]]]:
        """Those of the `others` of which no byte is in a range here, and the bytes of the others that are in none."""
        fresh, rest = [], []
        for each in others:
            gaps = list(self.gaps(*each[:2]))
            if gaps == [each[:2]]:
                fresh.append(each)
            else:
                rest += gaps
        return fresh, rest

    def checksum_of(self, begin: int, end: int) -> int | None:
        """The CRC32 of bytes `begin` to `end`; None unless complete ranges cover exactly these bytes."""
        ranges = list(self.within(begin, end))
        is_whole = sum(last - first for first, last, _ in ranges) == end - begin
        if not is_whole or (ranges and ranges[-1][1] != end):
            return None
        return _combined(ranges)

    def checksum(self) -> int:
        """The CRC32 of the bytes of all ranges, in order."""
        return _combined(self)

    @property
    def nbytes(self) -> int:
        """The total bytes of all ranges."""
        return sum(self._ends) - sum(self._begins)

    def lose(self) -> None:
        """Discard all ranges, and ignore later ones."""
        for column in (self._begins, self._ends, self._values):
            del column[:]
        self.lost = True

    def as_list(self) -> list[Range] | None:
        """The ranges as the constructor takes them."""
        return None if self.lost else list(self)


Passed = dict[str, ByteRanges]
"""The ranges of each file, by its path."""


def _combined(ranges: Iterable[Range]) -> int:
    total = 0
    for begin, end, value in ranges:
        total = crc32_combine(total, value, end - begin)
    return total


def join(passed: Passed, more: Mapping[str, ByteRanges | Iterable[Range] | None]) -> None:
    """Merge ranges of files into `passed`. None marks lost ranges."""
    for path, new in more.items():
        ranges = passed.setdefault(path, ByteRanges())
        if new is None or (isinstance(new, ByteRanges) and new.lost):
            ranges.lose()
            continue
        for each in new:
            ranges.add(*each)


class Ledger:
    """The ranges read of all storages with a recorded CRC32 or, with `every`, of all. `passed` are from an earlier run.

    Bytes that are read more than once count once, on their first read. Ranges end at each multiple of `boundary`. If
    there are more than `most` ranges, those of the file with the most ranges are lost.
    """

    def __init__(
        self,
        *,
        every: bool = False,
        passed: Passed | None = None,
        boundary: int = NEVER,
        most: int = MAX_RANGES,
    ) -> None:
        self._boundary = boundary
        self.passed: Passed = {} if passed is None else passed
        self._every, self._most = every, most
        self._count = sum(map(len, self.passed.values()))
        self._touched: set[Storage] = set()
        self._lock = Lock()

    def counts(self, storage: Storage) -> bool:
        """Whether reads of a storage are noted."""
        return self._every or storage.crc32 is not None

    def record(self, storage: Storage, parts: Iterable[tuple[int, memoryview]]) -> Passed:
        """Note the `parts` (offset, bytes) read from `storage`. Returns what is new, and what is lost."""
        if not self.counts(storage):
            return {}
        places = [(storage.offset + begin, data) for begin, data in parts]
        with self._lock:
            if storage.crc32 is not None:
                self._touched.add(storage)
            ranges = self.passed.setdefault(storage.path, ByteRanges())
            gaps = [] if ranges.lost else [[*ranges.gaps(at, at + len(data))] for at, data in places]
        summed = []
        for (at, data), unread in zip(places, gaps, strict=False):
            for gap in unread:
                cells = _cells(*gap, self._boundary) if self._boundary < NEVER else [gap]
                summed += [(first, last, crc32(data[first - at : last - at])) for first, last in cells]
        with self._lock:  # another thread may have noted the same ranges meanwhile
            return self._add(storage.path, summed)

    def _add(self, path: str, summed: Iterable[Range]) -> Passed:
        """Add ranges to those of a file, or lose some. Returns what is new, and what is lost."""
        ranges = self.passed.setdefault(path, ByteRanges())
        before = len(ranges)
        new = {path: ByteRanges(each for each in summed if ranges.add(*each, self._boundary))}
        self._count += len(ranges) - before
        while self._count > self._most:
            largest = max(self.passed, key=lambda each: len(self.passed[each]))
            if len(self.passed[largest]) < 2:
                break  # one range per file: the paths take more memory than this
            self._count -= len(self.passed[largest])
            self.passed[largest].lose()
            new[largest] = ByteRanges(None)
        return new

    def merge(self, more: Passed, runs: Passed) -> Passed:
        """Merge ranges that were read elsewhere; if some bytes of a range are here already, the others are read again.

        They end at multiples of `CELL_BYTES`. `runs` are the same, joined: there are few, and most of them are new or
        known completely. Returns what is new, and what is lost.
        """
        new: Passed = {}
        with closing(OpenFiles()) as files:
            for path, elsewhere in more.items():
                ranges = self.passed.setdefault(path, ByteRanges())
                if elsewhere.lost:
                    self._count -= len(ranges)
                    ranges.lose()
                    new[path] = ByteRanges(None)
                fresh, rest = ranges.unknown(runs[path])
                cells = (
                    each for begin, end in rest for each in elsewhere.within(begin - begin % CELL_BYTES, end)
                )
                more_fresh, rest = ranges.unknown(cells)
                join(new, self._add(path, fresh + more_fresh))
                for gap in rest:
                    join(new, self._read(files, path, *gap))
        return new

    def touch(self, storage: Storage) -> None:
        """Have a storage checked at the end, because an earlier run has read a part of it."""
        if storage.crc32 is not None:
            with self._lock:
                self._touched.add(storage)

    def is_right(self, storage: Storage) -> bool:
        """Whether all bytes of a storage were read, and have the recorded checksum."""
        with self._lock:
            return self._checksum(storage) == storage.crc32

    def is_wrong(self, storage: Storage) -> bool:
        """Whether all bytes of a storage were read, and do not have the recorded checksum."""
        if storage.crc32 is None:
            return False
        with self._lock:
            return self._checksum(storage) not in (None, storage.crc32)

    def _checksum(self, storage: Storage) -> int | None:
        """The CRC32 of a storage; None unless complete ranges cover exactly its bytes."""
        ranges = self.passed.get(storage.path, ByteRanges())
        return ranges.checksum_of(storage.offset, storage.offset + storage.nbytes)

    def settle(self) -> list[Storage]:
        """Read the rest of each storage that was touched, and return the storages whose CRC32 is wrong."""
        wrong = []
        with closing(OpenFiles()) as files:
            for storage in self._touched:
                begin, end = storage.offset, storage.offset + storage.nbytes
                self._read(files, storage.path, begin, end)
                checksum = self._checksum(storage)
                if checksum is None:  # it is inside a larger range, or its ranges are lost
                    alone = Ledger()
                    alone._read(files, storage.path, begin, end)
                    checksum = alone._checksum(storage)
                if checksum != storage.crc32:
                    wrong.append(storage)
        return wrong

    def complete(self, sizes: Mapping[str, int]) -> None:
        """Read the rest of each file if little is missing. `sizes` are those of the files, in bytes."""
        with closing(OpenFiles()) as files:
            for path, size in sizes.items():
                ranges = self.passed.get(path, ByteRanges())
                rest = 0 if ranges.lost else size - ranges.nbytes
                if 0 < rest <= max(MAX_UNREAD_BYTES, size // MAX_UNREAD_DIVISOR):
                    self._read(files, path, 0, size)

    def _read(self, files: OpenFiles, path: str, begin: int, end: int) -> Passed:
        """Read those bytes of a file that are in no range. Returns what is new, and what is lost."""
        ranges, new = self.passed.setdefault(path, ByteRanges()), Passed()
        size = min(READ_BYTES, end - begin)
        while not ranges.lost and (batch := next(_batches(ranges.gaps(begin, end), size), None)):
            files.read(path, batch)
            join(new, self._add(path, [(start, start + len(part), crc32(part)) for start, part in batch]))
            begin = batch[-1][0] + len(batch[-1][1])
        return new


def _batches(gaps: Iterable[tuple[int, int]], size: int) -> Iterator[list[tuple[int, memoryview]]]:
    """Reads that fill gaps, in batches of `size` bytes: a remote store is asked for many gaps at once."""
    buffer, used = memoryview(bytearray(size)), 0
    batch: list[tuple[int, memoryview]] = []
    for first, last in gaps:
        for start in range(first, last, size):
            count = min(size, last - start)
            if used + count > size:
                yield batch
                batch, used = [], 0
            batch.append((start, buffer[used : used + count]))
            used += count
    if batch:
        yield batch


def _cells(begin: int, end: int, boundary: int) -> Iterator[tuple[int, int]]:
    """Bytes `begin` to `end`, cut at each multiple of `boundary`."""
    while begin < end:
        last = min(end, begin - begin % boundary + boundary)
        yield begin, last
        begin = last
