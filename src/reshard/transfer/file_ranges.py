"""Any range of a planned file, computed when it is asked for; nothing is written.

A range costs the reads of its own elements, not those of its file. What `convert` checks once at the end is checked
before bytes are handed out: that the sources are as they were when the plan was made, the CRC32s that they record, as
soon as all bytes of a storage were read, and that no cast makes a finite value infinite.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache

import numpy as np

from reshard.algebra.tensors import cells_of
from reshard.base.errors import Problem, raise_all
from reshard.transfer.batch import Batch, BlockState, batches
from reshard.transfer.elements import overflow_problem
from reshard.transfer.gather import Gatherer, crc_problem
from reshard.transfer.ledger import Ledger
from reshard.transfer.memory_budget import WINDOW_BYTES, ThreadShare
from reshard.transfer.plan import Plan
from reshard.transfer.shared_windows import Windows
from reshard.transfer.thread_files import OpenFiles

# No element is wider, in bytes.
MAX_ITEMSIZE = 16
# Files whose batches are kept.
FILES_KEPT = 16


class FileRanges:
    """The files of a plan, read in ranges by several threads at once. `share` is the memory of each of them."""

    def __init__(self, plan: Plan, share: ThreadShare) -> None:
        self.sources, self.share, self.ledger = plan.sources, share, Ledger(most=share.ranges)
        self._windows = Windows(share.windows) if share.windows else None
        files = {file.path: file for file in plan.files}
        self._batches = lru_cache(FILES_KEPT)(lambda path: list(batches(files[path])))
        self._idle: deque[tuple[OpenFiles, Gatherer]] = deque()

    def parts(self, path: str, begin: int, end: int) -> list[RangePart]:
        """Bytes `begin` to `end` of a file, as consecutive parts."""
        return [
            RangePart(self, batch, max(begin, batch.begin), min(end, batch.end))
            for batch in self._batches(path)
            if batch.begin < end and batch.end > begin
        ]

    def close(self) -> None:
        """Close the files that no thread is reading. They are opened again when they are needed."""
        with suppress(IndexError):
            while True:
                self._idle.pop()[0].close()

    @contextmanager
    def reader(self) -> Iterator[tuple[OpenFiles, Gatherer]]:
        """Open files and a gatherer that no other thread has meanwhile."""
        try:
            files, gatherer = self._idle.pop()
        except IndexError:
            files = OpenFiles(opener=self.sources.reopened)
            gatherer = Gatherer(files, self.ledger, self.share.gathering, self._windows)
        try:
            yield files, gatherer
        finally:
            gatherer.take_passed()  # the ledger has these ranges, and no journal needs them
            gatherer.take_lost()
            self._idle.append((files, gatherer))


class RangePart:
    """Bytes `begin` to `end` of a file, all in one batch. Its views are compiled by `windows`."""

    def __init__(self, ranges: FileRanges, batch: Batch, begin: int, end: int) -> None:
        self._ranges, self._batch, self._begin, self._end = ranges, batch, begin, end
        self._streams: list[BlockState] = []

    def windows(self) -> list[range]:
        """What to read at once, in this order: places of bytes in the file, between ends of elements."""
        begin, end = self._begin, self._end
        blocks = (
            each for each in self._batch.blocks if each.offset < end and each.offset + each.nbytes > begin
        )
        self._streams = [BlockState(block) for block in blocks]
        is_transposed = any(map(BlockState.is_transposed, self._streams))
        limit = self._ranges.share.wide if is_transposed else WINDOW_BYTES
        needed = self._batch.element_at(end + MAX_ITEMSIZE - 1)
        windows = self._batch.windows(limit, self._batch.element_at(begin))
        return [range(first, min(last, needed)) for first, last in windows if first < end]

    def read(self, window: range) -> tuple[memoryview, int]:
        """The bytes of a window that belong to this part, and how many bytes of sources were read for them.

        Raises ReshardError and OSError if a source has changed, is damaged or cannot be read.
        """
        raw = np.empty(len(window), np.uint8)
        with self._ranges.reader() as (files, gatherer):
            before = files.read_bytes
            self._batch.fill(raw, window.start, self._streams, gatherer)
            for path, file in files.opened.items():
                self._ranges.sources.check_unchanged(path, file)
            read = files.read_bytes - before
        raise_all(overflow_problem(each.block.name, each.overflow) for each in self._streams if each.overflow)
        if window.stop >= self._end:
            raise_all(self._wrong_sums())
        return raw.data[max(self._begin - window.start, 0) : self._end - window.start], read

    def _wrong_sums(self) -> Iterator[Problem]:
        """Storages that were read completely, and do not have the recorded CRC32."""
        names = {cells.storage: each.block.name for each in self._streams for cells in cells_of(each.view)}
        for storage, name in names.items():
            if self._ranges.ledger.is_wrong(storage):
                yield crc_problem(storage, name)
