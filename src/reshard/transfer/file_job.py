"""An output file while it is written: which batches are left, and what the journal must record."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from copy import deepcopy
from threading import Lock

from reshard.transfer.batch import Batch, batches
from reshard.transfer.digests import FileDigest, PartDigests
from reshard.transfer.gather import Gatherer
from reshard.transfer.journal import FLUSH_RANGES
from reshard.transfer.plan import OutputFile
from reshard.transfer.run_state import RunState, SourceReads
from reshard.transfer.sink import Sink
from reshard.transfer.written_file import BegunBlock, FileState, WrittenFile

RECORD_SECONDS = 5.0
"""Seconds of work on a file that are lost when the run is killed, if it is slow."""


def continued(state: RunState, file: OutputFile) -> FileJob:
    """The work on a file that no earlier run has done."""
    before = state.files.get(file.path, WrittenFile())
    job = FileJob(state, file, before, digest=state.digests.pop(file.path, None))
    state.files[file.path] = job.written
    return job


class FileJob:
    """An output file while it is written. Only its batches in `wanted` are written (by default all).

    What was done `before`, whose bytes are in `digest`, is not repeated; if that is all, the file is only to be closed.
    """

    def __init__(
        self,
        state: RunState,
        file: OutputFile,
        before: WrittenFile,
        wanted: set[int] | None = None,
        digest: FileDigest | None = None,
    ) -> None:
        left = [batch for batch in batches(file) if batch.number not in before.batches]
        self.waiting = [batch for batch in left if wanted is None or batch.number in wanted][::-1]
        self.active = 0
        self.written = deepcopy(before)
        self.unsaved = SourceReads()
        """What was read for it that the journal has not recorded yet."""
        self._unsaved_sums = PartDigests()
        self._state, self._file, self.path = state, file, file.path
        self._unrecorded, self._unflushed, self._recorded_at = 0, 0, time.monotonic()
        self._saving = Lock()
        self._sink: Sink | None = None
        self._digest = digest
        self._opening = Lock()

    @property
    def sink(self) -> Sink:
        """The file, opened on first use."""
        with self._opening:
            if self._sink is None:
                self._sink = Sink(
                    self._state.folder / self.path,
                    self._file.size,
                    durable=self._state.journal.durable,
                    direct=self._state.direct,
                )
            return self._sink

    @property
    def digest(self) -> FileDigest:
        """The digest of the bytes written so far, which takes memory from the first use on."""
        with self._opening:
            if self._digest is None:
                self._digest = FileDigest(self._file.size)
            return self._digest

    def abandon(self) -> None:
        """Close the file without waiting for the disk."""
        if self._sink:
            self._sink.abandon()

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes that will not change, except for late checksums."""
        self.sink.write(data, offset)
        self.digest.add(data, offset)

    def wrote(self, batch: Batch, begun: BegunBlock | None, nbytes: int, gatherer: Gatherer) -> None:
        """Count a window, after which a large block may have `begun`."""
        with self._state.lock:
            self._unrecorded += nbytes
            self._unflushed += nbytes
            if not begun:
                return
            self.written.begun[batch.number] = begun
            self._keep(SourceReads(ranges=gatherer.take_passed()))
        self._record_at_times()

    def finish(self, written: WrittenFile, read: SourceReads) -> None:
        """Add batches that are written, and what was read for them."""
        with self._state.lock:
            self.written.add(written)
            self._keep(read)
        if self.waiting or self.active > 1:  # or else it is complete, and `close` records it
            self._record_at_times()

    def _record_at_times(self) -> None:
        """Record what is written after some bytes or seconds; after more bytes, flush it to disk first."""
        with self._state.lock:
            ranges, now = sum(map(len, self.unsaved.ranges.values())), time.monotonic()
            is_late = now - self._recorded_at >= RECORD_SECONDS
            if self._unrecorded < self._state.every and ranges < FLUSH_RANGES and not is_late:
                return
            self._unrecorded, self._recorded_at = 0, now
            must_flush = self._unflushed >= self._state.flush_every
            self._unflushed = 0 if must_flush else self._unflushed
        if must_flush:
            self.save()
        else:
            self.record()

    def _keep(self, read: SourceReads) -> None:
        """Keep what was read for the journal; the ranges only if it is open, since the ledger has them too."""
        self.unsaved.add(read if self._state.journal.is_open else SourceReads(read.storages))

    def is_written(self) -> bool:
        """Whether no batch is left, now that a thread has finished its own."""
        with self._state.lock:
            self.active -= 1
            return not self.active and not self.waiting

    def save(self) -> None:
        """Wait until everything written is on disk, and record it."""
        if self._state.journal.is_open:
            self.record(self.sink.flush)

    def close(self) -> None:
        """Write the remaining checksums, make the file durable, and record it as complete."""
        late = self.written.late
        if late:
            self.save()  # if this is where the run is killed, the next one must know what they change
        self.digest.patch(self._state.folder / self.path, late)
        for place, checksum in late:
            self.sink.write(memoryview(checksum), place)
        digest = self.digest.finish()
        self.written = self._state.files[self.path] = WrittenFile(
            self._file.size,
            nonfinite=self.written.nonfinite,
            overflowed=self.written.overflowed,
            state=FileState.of(self.sink.close()),
            digest=digest,
        )
        self.record()

    def record(self, wait: Callable[[], os.stat_result | None] = lambda: None) -> None:
        """Record what is written now, once `wait` has returned. If that fails, what was read is recorded later."""
        if not self._state.journal.is_open:
            return
        with self._saving:
            with self._state.lock:
                written = deepcopy(self.written)
                unsaved, self.unsaved = self.unsaved, SourceReads()
            try:
                self._unsaved_sums.join(self.digest.news())
                if status := wait():
                    written.state = FileState.of(status)
                sums = None if written.is_whole else self._unsaved_sums
                self._state.record(self.path, written, sums, unsaved)
            except (OSError, MemoryError):
                with self._state.lock:
                    unsaved.add(self.unsaved)
                    self.unsaved = unsaved
                raise
            self._unsaved_sums = PartDigests()
