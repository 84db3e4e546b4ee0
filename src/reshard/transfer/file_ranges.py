"""Any range of a planned file, computed when it is asked for; nothing is written.

A range costs the reads of its own elements, not those of its file. What `convert` checks once at the end is checked
before bytes are handed out: that the sources are as they were when the plan was made, the CRC32s that they record, as
soon as all bytes of a storage were read, and that no cast makes a finite value infinite.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import numpy as np

from reshard.algebra.tensors import cells_of
from reshard.base.errors import ReshardError
from reshard.transfer.batch import Batch, BlockState, batches
from reshard.transfer.elements import overflow_problem
from reshard.transfer.gather import Gatherer, crc_problem
from reshard.transfer.ledger import Ledger
from reshard.transfer.memory_budget import ThreadShare
from reshard.transfer.plan import Plan
from reshard.transfer.shared_windows import Windows
from reshard.transfer.thread_files import OpenFiles

SERVED_WINDOW_BYTES = 1 << 20
"""Bytes computed at a time, unless the tensor is transposed: whoever takes them slowly holds no more."""

MAX_ITEMSIZE = 16
"""No element is wider, in bytes."""

FILES_KEPT = 16
"""Files whose batches are kept."""


class FileRanges:
    """The files of a plan, read in ranges by several threads at once. `share` is the memory of each of them."""

    def __init__(self, plan: Plan, share: ThreadShare) -> None:
        self._files = {file.path: file for file in plan.files}
        self._sources, self._share = plan.sources, share
        self._ledger = Ledger(most=share.ranges)
        self._windows = Windows(share.windows) if share.windows else None
        self._batches: OrderedDict[str, list[Batch]] = OrderedDict()
        self._idle: deque[_RangeReader] = deque()
        self._lock = Lock()

    def read(self, path: str, begin: int, end: int) -> Iterator[tuple[memoryview, int]]:
        """Bytes `begin` to `end` of a file in consecutive parts, each with the bytes of sources read for it.

        Each part may be asked for by another thread. Raises ReshardError as soon as a source has changed, is damaged
        or cannot be read.
        """
        for batch in self._batches_of(path):
            if batch.begin < end and batch.end > begin:
                yield from self._read(batch, max(begin, batch.begin), min(end, batch.end))

    def close(self) -> None:
        """Close all files that no thread is reading."""
        while self._idle:
            self._idle.pop().files.close()

    def _batches_of(self, path: str) -> list[Batch]:
        with self._lock:
            if path not in self._batches:
                self._batches[path] = list(batches(self._files[path]))
            self._batches.move_to_end(path)
            while len(self._batches) > FILES_KEPT:
                self._batches.popitem(last=False)
            return self._batches[path]

    def _read(self, batch: Batch, begin: int, end: int) -> Iterator[tuple[memoryview, int]]:
        blocks = [each for each in batch.blocks if each.offset < end and each.offset + each.nbytes > begin]
        streams = [BlockState(block) for block in blocks]
        limit = self._share.wide if any(map(BlockState.is_transposed, streams)) else SERVED_WINDOW_BYTES
        needed = batch.element_at(end + MAX_ITEMSIZE - 1)
        for first, whole in batch.windows(limit, batch.element_at(begin)):
            if first >= end:
                return
            last = min(whole, needed)
            raw = np.empty(last - first, np.uint8)
            with self._reader() as reader:
                before = reader.files.read_bytes
                batch.fill(raw, first, streams, reader.gatherer)
                for path, file in reader.files.opened.items():
                    self._sources.check_unchanged(path, file)
                read = reader.files.read_bytes - before
            self._check(streams, is_last=last >= end)
            yield raw.data[max(begin - first, 0) : end - first], read

    @contextmanager
    def _reader(self) -> Iterator[_RangeReader]:
        """A reader that no other thread has meanwhile."""
        try:
            reader = self._idle.pop()
        except IndexError:
            files = OpenFiles(opener=self._sources.reopened)
            reader = _RangeReader(files, Gatherer(files, self._ledger, self._share.gathering, self._windows))
        yield reader
        reader.gatherer.take_passed()  # the ledger has these ranges, and no journal needs them
        self._idle.append(reader)

    def _check(self, streams: list[BlockState], *, is_last: bool) -> None:
        """Raise ReshardError for values that were lost, and if it is the last part, for wrong checksums."""
        lost = [overflow_problem(each.block.name, each.overflow) for each in streams if each.overflow]
        if lost:
            raise ReshardError(lost)
        if not is_last:
            return
        names = {cells.storage: each.block.name for each in streams for cells in cells_of(each.view)}
        if wrong := [storage for storage in names if self._ledger.is_wrong(storage)]:
            raise ReshardError([crc_problem(storage, names[storage]) for storage in wrong])


class _RangeReader:
    """The open files and the buffers of one thread."""

    def __init__(self, files: OpenFiles, gatherer: Gatherer) -> None:
        self.files, self.gatherer = files, gatherer
