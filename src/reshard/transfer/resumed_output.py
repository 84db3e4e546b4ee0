"""What an earlier run left of an output, compared with its journal before it is continued.

Between two runs, a disk can change or lose bytes, and anything may write to a hidden folder. So the bytes on the disk
count only if they have the digests that the journal recorded while they were in memory. All others are written again.
A file that nobody has written since the journal recorded it, on a machine that has not restarted, is not read: it is in
no more danger than the files that an uninterrupted run has written before it publishes them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Lock

from reshard.stores import OpenFile, open_file
from reshard.transfer.batch import batches
from reshard.transfer.digests import CELL_BYTES, DIGEST_BYTES, FileDigest, PartDigests, digest_of, matches
from reshard.transfer.journal import Journal
from reshard.transfer.plan import OutputFile, Plan
from reshard.transfer.threads import taken, together
from reshard.transfer.written_file import WrittenFile

CELLS_AT_A_TIME = 256
"""Cells that a thread checks at a time."""


@dataclass
class KeptFiles:
    """What can be trusted: a digest of each file that is not complete, with all bytes that need not be written again.

    `lost` counts the other bytes that the journal names.
    """

    digests: dict[str, FileDigest] = field(default_factory=dict)
    lost: int = 0


def check_kept(plan: Plan, folder: Path, journal: Journal, threads: int) -> KeptFiles:
    """Read what the journal says is in `folder` at most once, and take back from the journal what is something else.

    Raises OSError if a file cannot be read.
    """
    before = journal.progress.nbytes
    written = {path: each for path, each in journal.progress.files.items() if each.elsewhere is None}
    whole = [path for path, each in written.items() if each.is_whole]
    checks = [
        _FileCheck(file, written[file.path], journal.progress.sums.get(file.path, PartDigests()))
        for file in plan.files
        if file.path in written and file.path not in whole
    ]
    waiting: deque[str | tuple[_FileCheck, int]] = deque(whole)
    waiting.extend((check, first) for check in checks for first in check.starts())
    wrong: list[str] = []

    def work(index: int, stopped: Event) -> None:
        for task in taken(waiting, stopped):
            if not isinstance(task, str):
                task[0].check(folder, task[1])
            elif not _is_as_written(folder / task, written[task], journal, stopped):
                wrong.append(task)

    together(work, threads)
    for path in wrong:
        journal.record(path, WrittenFile())
    for check in checks:
        if (right := check.right()).nbytes < written[check.file.path].nbytes:
            journal.record(check.file.path, right)
    lost = before - journal.progress.nbytes
    return KeptFiles({check.file.path: check.digest for check in checks}, lost)


def _is_as_written(path: Path, written: WrittenFile, journal: Journal, stopped: Event) -> bool:
    """Whether a complete file is as it was; if the run that wrote it did not wait for the disk, this one does."""
    journal.sync(path)
    if written.is_still(path):
        return True
    return digest_of(path, stopped.is_set, from_disk=False) == written.digest or stopped.is_set()


class _FileCheck:
    """The check of a file that is not complete."""

    def __init__(self, file: OutputFile, written: WrittenFile, sums: PartDigests) -> None:
        self.file = file
        self.digest = FileDigest(file.size)
        self._written, self._sums = written, sums
        self._ranges = sorted(_claimed(file, written))
        self._begins = [begin for begin, _, _ in self._ranges]
        self._wrong: set[int] = set()
        self._lock = Lock()
        self._known = bytearray(-(-file.size // CELL_BYTES) * DIGEST_BYTES)
        for first, digests in sums.cells:
            self._known[first * DIGEST_BYTES : first * DIGEST_BYTES + len(digests)] = digests
        self._parts: dict[int, list[tuple[int, int]]] = {}
        for begin, end in sorted(sums.ranges):
            self._parts.setdefault(begin // CELL_BYTES, []).append((begin, end))

    def starts(self) -> Iterator[int]:
        """The first cells of the parts in which `check` reads the file."""
        return iter(range(0, -(-self.file.size // CELL_BYTES), CELLS_AT_A_TIME)) if self._ranges else iter(())

    def check(self, folder: Path, first: int) -> None:
        """Read the recorded bytes of `CELLS_AT_A_TIME` cells, and add them to the digest if they are as they were."""
        is_still = self._written.is_still(folder / self.file.path)
        with open_file(folder / self.file.path) as file:
            for cell in range(first, min(first + CELLS_AT_A_TIME, -(-self.file.size // CELL_BYTES))):
                begin, end = cell * CELL_BYTES, min((cell + 1) * CELL_BYTES, self.file.size)
                claimed = list(self._within(begin, end))
                ranges = list(_joined_ranges(claimed))
                if is_still and ranges == [(begin, end)] and any(known := self._digest_of(cell)):
                    self.digest.know(cell, known)
                elif claimed and not self._is_right(file, cell, ranges):
                    with self._lock:
                        self._wrong.update(number for _, _, number in claimed)

    def _digest_of(self, cell: int) -> bytes:
        """The digest that the journal recorded for a cell; zeros if it has none."""
        return bytes(self._known[cell * DIGEST_BYTES : (cell + 1) * DIGEST_BYTES])

    def _within(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """What is claimed of bytes `begin` to `end`, with the number of each batch."""
        for at in range(max(bisect_right(self._begins, begin) - 1, 0), len(self._ranges)):
            first, last, number = self._ranges[at]
            if first >= end:
                return
            if last > begin:
                yield max(first, begin), min(last, end), number

    def _is_right(self, file: OpenFile, cell: int, claimed: list[tuple[int, int]]) -> bool:
        """Whether the `claimed` ranges of a cell have their digests; if so, the digest has them, too."""
        begin, end = cell * CELL_BYTES, min((cell + 1) * CELL_BYTES, self.file.size)
        digest = self._digest_of(cell)
        if not any(digest):
            pieces = list(self._pieces(cell, claimed))
            contents = [file.read(first, last - first) for first, last in pieces]
            if sum(last - first for first, last in pieces) < sum(last - first for first, last in claimed):
                return False
            if not all(
                matches(each, self._sums.ranges[place]) for place, each in zip(pieces, contents, strict=True)
            ):
                return False
            for (first, _), each in zip(pieces, contents, strict=True):
                self.digest.add(memoryview(each), first)
            return True
        content = file.read(begin, end - begin)
        late = [(place - begin, checksum) for place, checksum in self._written.late]
        if not matches(content, digest, [each for each in late if -4 < each[0] < CELL_BYTES]):
            return False
        if claimed == [(begin, end)]:
            self.digest.know(cell, digest)
            return True
        for first, last in claimed:
            self.digest.add(memoryview(content)[first - begin : last - begin], first)
        return True

    def _pieces(self, cell: int, claimed: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Adjacent ranges with digests that cover as much of each claimed range as possible."""
        parts = self._parts.get(cell, [])
        for begin, end in claimed:
            ends = [last for first, last in parts if first == begin and last <= end]
            while ends:
                yield begin, (begin := max(ends))
                ends = [last for first, last in parts if first == begin and last <= end]

    def right(self) -> WrittenFile:
        """What is written of the file, without the batches that have a part in a cell with other bytes."""
        batches = self._written.batches - self._wrong
        return replace(
            self._written,
            finished=sum(end - begin for begin, end, number in self._ranges if number in batches),
            batches=batches,
            begun={number: each for number, each in self._written.begun.items() if number not in self._wrong},
        )


def _claimed(file: OutputFile, written: WrittenFile) -> Iterator[tuple[int, int, int]]:
    """The ranges of a file that were written: those of finished batches, and the beginnings of large blocks."""
    for batch in batches(file):
        end = batch.begin
        if batch.number in written.batches:
            end = batch.end
        elif begun := written.begun.get(batch.number):
            end = begun.end
        if end > batch.begin:
            yield batch.begin, end, batch.number


def _joined_ranges(ranges: Iterable[tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """Sorted ranges, adjacent ones as one."""
    begin = end = -1
    for first, last, *_ in ranges:
        if first != end:
            if begin >= 0:
                yield begin, end
            begin = first
        end = last
    if begin >= 0:
        yield begin, end
