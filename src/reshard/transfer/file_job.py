"""An output file while it is written: which batches are done, what they found, and what the journal must record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

from reshard.algebra.storage import Storage
from reshard.transfer.batch import Batch, batches
from reshard.transfer.digests import FileDigest, PartDigests
from reshard.transfer.gather import Gatherer
from reshard.transfer.journal import FLUSH_RANGES, BegunBlock, WrittenFile, as_entry
from reshard.transfer.ledger import Passed, join
from reshard.transfer.overflow import Overflow
from reshard.transfer.plan import OutputFile
from reshard.transfer.run_state import RunState
from reshard.transfer.sink import Sink


@dataclass
class BatchFindings:
    """What finished batches of `nbytes` bytes in total have found.

    `late` are checksums (offset, value) that belong outside of the window of their block, `taken` are storages with a
    checksum that were read from, `passed` the ranges of sources that were read, `overflowed` the finite values that a
    cast lost, by tensor and offset of the block, `sums` digests that the journal could not be told.
    """

    batches: list[int] = field(default_factory=list)
    nbytes: int = 0
    late: list[tuple[int, bytes]] = field(default_factory=list)
    nonfinite: set[str] = field(default_factory=set)
    taken: set[Storage] = field(default_factory=set)
    passed: Passed = field(default_factory=dict)
    overflowed: dict[tuple[str, int], Overflow] = field(default_factory=dict)
    sums: PartDigests = field(default_factory=PartDigests)

    def add(self, other: BatchFindings) -> None:
        """Add what other batches have found."""
        self.batches += other.batches
        self.nbytes += other.nbytes
        self.late += other.late
        self.nonfinite |= other.nonfinite
        self.taken |= other.taken
        self.overflowed |= other.overflowed
        join(self.passed, other.passed)
        self.sums.join(other.sums)


def continued(state: RunState, file: OutputFile) -> FileJob:
    """The work on a file that no earlier run has done."""
    before = state.journal.progress.files.get(file.path, WrittenFile())
    return FileJob(state, file, before, digest=state.digests.pop(file.path, None))


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
        parts = list(batches(file))
        done = [batch for batch in parts if batch.number in before.batches]
        left = [batch for batch in parts if batch.number not in before.batches]
        self.waiting = [batch for batch in left if wanted is None or batch.number in wanted][::-1]
        self.active = 0
        self.begun = dict(before.begun)
        """Progress of unfinished large blocks, by the numbers of their batches."""
        self.unsaved = BatchFindings()
        """What the journal has not recorded yet."""
        self._state, self._file = state, file
        self._late = list(before.late)
        self._begins = {batch.number: batch.begin for batch in parts}
        self._nbytes = sum(batch.end - batch.begin for batch in done)
        self._loose = 0
        self._saving = Lock()
        self._sink: Sink | None = None
        self._digest = digest
        self._opening = Lock()

    @property
    def path(self) -> str:
        """The path of the file in the output."""
        return self._file.path

    @property
    def sink(self) -> Sink:
        """The file, opened on first use."""
        with self._opening:
            if self._sink is None:
                self._sink = Sink(
                    self._state.folder / self._file.path,
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
        """Count a window, after which a large block may have `begun`; flush to disk at intervals."""
        with self._state.lock:
            if begun:
                self.begun[batch.number] = begun
                self._keep(BatchFindings(passed=gatherer.take_passed()))
            self._loose += nbytes
            if self._loose < self._state.every and sum(map(len, self.unsaved.passed.values())) < FLUSH_RANGES:
                return
            self._loose = 0
        self.save()

    def finish(self, found: BatchFindings) -> None:
        """Record that batches are written."""
        with self._state.lock:
            for number in found.batches:
                self.begun.pop(number, None)
            self._nbytes += found.nbytes
            self._late += found.late
            if found.overflowed:
                self._state.report.overflowed.setdefault(self.path, {}).update(found.overflowed)
            self._keep(found)

    def _keep(self, found: BatchFindings) -> None:
        """Keep findings for the journal; the ranges only if it is open, since the ledger has them too."""
        self.unsaved.add(found if self._state.journal.is_open else replace(found, passed={}))

    def is_written(self) -> bool:
        """Whether no batch is left, now that a thread has finished its own."""
        with self._state.lock:
            self.active -= 1
            return not self.active and not self.waiting

    def save(self) -> None:
        """Wait until everything written is on disk, and record it."""
        if not self._state.journal.is_open:
            return
        with self._saving, self._noting() as entry:
            self.sink.flush()
            self._note(entry)

    def note(self) -> None:
        """Record findings of finished batches that are already on disk."""
        if self._state.journal.is_open:
            with self._saving, self._noting() as entry:
                self._note(entry)

    def close(self) -> None:
        """Write the remaining checksums, make the file durable, and record it as complete."""
        if self._late:
            self.save()  # if this is where the run is killed, the next one must know what they change
        self.digest.patch(self._state.folder / self._file.path, self._late)
        for place, checksum in self._late:
            self.sink.write(memoryview(checksum), place)
        digest = self.digest.finish()
        modified = self.sink.close()
        self._state.report.digests[self._file.path] = digest
        with self._saving, self._noting() as entry:
            self._note({**entry, "bytes": self._file.size, "modified": modified, "digest": digest})

    @contextmanager
    def _noting(self) -> Iterator[dict[str, Any]]:
        """The entry to record once the bytes are on disk. If the block fails, a later entry records the findings."""
        with self._state.lock:
            unsaved, self.unsaved = self.unsaved, BatchFindings()
            entry = self._entry(unsaved)
        try:
            yield entry
        except (OSError, MemoryError):
            with self._state.lock:
                unsaved.add(self.unsaved)
                self.unsaved = unsaved
            raise

    def _entry(self, unsaved: BatchFindings) -> dict[str, Any]:
        begun = sum(each.end - self._begins[number] for number, each in self.begun.items())
        return {
            "file": self._file.path,
            "bytes": self._nbytes + begun,
            "batches": unsaved.batches,
            "begun": dict(self.begun),
            "late": [(place, checksum.hex()) for place, checksum in unsaved.late],
            "nonfinite": sorted(unsaved.nonfinite),
            "overflowed": [[*place, *overflow] for place, overflow in unsaved.overflowed.items()],
            "taken": unsaved.taken,
            "passed": unsaved.passed,
            "sums": self._news(unsaved),
        }

    def _news(self, unsaved: BatchFindings) -> PartDigests:
        """Digests that the journal does not have; `unsaved` has those that it could not be told the last time."""
        if self._state.journal.is_open:
            unsaved.sums.join(self.digest.news())
        return unsaved.sums

    def _note(self, entry: dict[str, Any]) -> None:
        later, checked = self._state.checks(entry["taken"])
        named = {"unchecked": [[name, *as_entry(each)] for each, name in later.items()]}
        told = {key: value for key, value in entry.items() if key not in ("taken", "sums")}
        sums = None if "modified" in entry else entry["sums"]
        self._state.journal.add({**told, **named, "checked": list(map(as_entry, checked))}, sums)
        self._state.note_checks(later, checked)
