"""Run a plan: each file is put together window by window, and each window is written once, at its place.

Work is handed out in batches, each thread on the file that fewest others are writing. Memory is bounded by the window
of each thread and what it reads of its sources to pick from, whatever the size of the model.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from threading import Event, Lock
from typing import Any

from reshard.algebra.storage import Storage
from reshard.algebra.tensors import cells_of
from reshard.errors import ReshardError
from reshard.transfer.batch import WINDOW, Batch, Stream, batches
from reshard.transfer.digests import Digest
from reshard.transfer.gather import Files, Gatherer, Ledger, crc_problem
from reshard.transfer.journal import EVERY, Begun, Journal, Written, as_entry
from reshard.transfer.plan import OutputFile, Plan
from reshard.transfer.sink import Buffer, Sink
from reshard.transfer.threads import together

WIDE_WINDOW = 32 << 20
"""The same where a tensor is transposed, so that one read of its source serves many rows."""

PATIENCE = 1.0
"""Seconds for which a run that is interrupted waits for the disk, to keep more than it must."""


@dataclass
class Report:
    """What passed: bytes of the output, how many of them an earlier run had written, tensors that hold NaN or Inf.

    `digests` are those of all files, by their paths.
    """

    nbytes: int = 0
    resumed: int = 0
    nonfinite: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)


def worker_count(workers: int | None, memory: int) -> int:
    """How many threads to run: two a core, so that one gathers while another waits for the disk.

    There are fewer if their buffers would not fit in `memory` bytes.
    """
    wanted = workers or min(8, 2 * (os.cpu_count() or 1))
    return max(1, min(wanted, memory // peak_per_worker(memory)))


def peak_per_worker(memory: int) -> int:
    """Bytes of buffers that one thread holds at most."""
    return 2 * min(WIDE_WINDOW, max(WINDOW, memory // 4))


def execute(
    plan: Plan,
    folder: Path,
    *,
    memory: int = 1 << 30,
    workers: int | None = None,
    checksum: bool = True,
    on_bytes: Callable[[int], None] = lambda count: None,
    journal: Journal | None = None,
) -> Report:
    """Write all files of `plan` below `folder`, which exists, and holds what `journal` says that it does.

    Raises ReshardError if a source is shorter than it was, or if bytes do not have the CRC32 that was
    recorded for them, which `checksum` turns off. What was written until then stays in `folder`, and is in the journal.
    """
    parents = {parent for file in plan.files for parent in PurePosixPath(file.path).parents}
    for parent in sorted(parents - {PurePosixPath()}):
        # Never `folder` itself: whoever removes it shall not get a part of it back.
        (folder / parent).mkdir(exist_ok=True)
    run = _Run(plan, folder, memory, Ledger() if checksum else None, on_bytes, journal or Journal())
    try:
        together(run.work, worker_count(workers, memory))
    finally:
        run.leave()
    run.settle()
    return run.report


class _Run:
    """The state that the threads of one execution share."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        memory: int,
        ledger: Ledger | None,
        on_bytes: Callable[[int], None],
        journal: Journal,
    ) -> None:
        self.folder = folder
        self.on_bytes = on_bytes
        self.ledger = ledger
        self.journal = journal
        self.wide = min(WIDE_WINDOW, max(WINDOW, memory // 4))
        before = journal.progress
        self.report = Report(before.nbytes, before.nbytes, sorted(before.nonfinite))
        self.report.digests = {path: each.digest for path, each in before.files.items() if each.is_whole}
        self.lock = Lock()
        self._names = dict(before.unchecked)
        self._unchecked = set(before.unchecked)
        self.touch(before.unchecked)
        self._waiting = deque(
            file for file in plan.files if not before.files.get(file.path, Written()).is_whole
        )
        self._open: list[_Job] = []  # with batches that nobody has taken
        self._unfinished: set[_Job] = set()

    def work(self, index: int, stopped: Event) -> None:
        """Take batches until there are none left."""
        worker = _Worker(self)
        try:
            while not stopped.is_set() and (taken := self._take()):
                job, batch = taken
                if worker.write(job, batch, stopped) and job.is_written() and job.close(stopped):
                    self._unfinished.discard(job)
        finally:
            worker.close()

    def _take(self) -> tuple[_Job, Batch] | None:
        """The next batch, of the open file with the fewest writers, or of a new file."""
        with self.lock:
            job = min(self._open, key=lambda job: job.active, default=None)
            if (job is None or job.active) and self._waiting:
                job = _Job(self, self._waiting.popleft())
                self._open.append(job)
                self._unfinished.add(job)
            if job is None:
                return None
            batch = job.waiting.pop()
            job.active += 1
            if not job.waiting:
                self._open.remove(job)
            return job, batch

    def note(self, stream: Stream) -> list[Storage]:
        """Keep what one finished block showed; return the storages that it was read from, if they have checksums."""
        name = stream.block.name
        storages = [cells.storage for cells in cells_of(stream.view)]
        with self.lock:
            if stream.nonfinite and name not in self.report.nonfinite:
                self.report.nonfinite.append(name)
            for storage in storages:
                self._names.setdefault(storage, name)
        return [storage for storage in storages if storage.crc32 is not None]

    def touch(self, storages: Iterable[Storage]) -> None:
        """Have storages checked whole at the end: an earlier run has taken something of them."""
        if self.ledger:
            for storage in storages:
                self.ledger.touch(storage)

    def checks(self, taken: set[Storage]) -> dict[str, Any]:
        """What the journal has to say of checksums once a file holds what was `taken`: which have yet to be checked."""
        if self.ledger is None or not self.journal.is_open:
            return {}
        with self.lock:
            later = [each for each in taken - self._unchecked if not self.ledger.is_right(each)]
            checked = [each for each in self._unchecked if self.ledger.is_right(each)]
            self._unchecked.update(later)
            self._unchecked.difference_update(checked)
            named = [[self._names.get(each, ""), *as_entry(each)] for each in later]
        return {"unchecked": named, "checked": [as_entry(each) for each in checked]}

    def advance(self, nbytes: int) -> None:
        """Count what was written."""
        with self.lock:
            self.report.nbytes += nbytes
        self.on_bytes(nbytes)

    def leave(self) -> None:
        """Note how far each file has come that is not finished, as far as the disk and the time allow, and close it."""
        deadline = time.monotonic() + PATIENCE
        for job in self._unfinished:
            with suppress(OSError):
                if time.monotonic() < deadline:
                    job.save()
            job.sink.abandon()

    def settle(self) -> None:
        """Compare all checksums; every damaged tensor is named."""
        self.report.nonfinite.sort()
        if self.ledger is None:
            return
        files = Files()
        try:
            wrong = self.ledger.settle(files)
        finally:
            files.close()
        if wrong:
            raise ReshardError([crc_problem(storage, self._names.get(storage)) for storage in wrong])


@dataclass
class _Unsaved:
    """What finished batches have shown, and the journal does not say yet."""

    batches: list[int] = field(default_factory=list)
    late: list[tuple[int, bytes]] = field(default_factory=list)
    nonfinite: set[str] = field(default_factory=set)
    taken: set[Storage] = field(default_factory=set)


class _Job:
    """An output file while it is being written."""

    def __init__(self, run: _Run, file: OutputFile) -> None:
        before = run.journal.progress.files.get(file.path, Written())
        parts = list(batches(file))
        done = [batch for batch in parts if batch.number in before.batches]
        if len(done) == len(parts):  # but the file was not closed: something has to be left to do
            done.remove(min(done, key=lambda batch: batch.end - batch.begin))
        self.sink = Sink(run.folder / file.path, file.size)
        self.waiting = [batch for batch in parts if batch not in done][::-1]
        self.active = 0
        self.begun = dict(before.begun)
        """How far the large blocks have come that are not finished, by the numbers of their batches."""
        self._run, self._file = run, file
        self._late = list(before.late)
        """Checksums whose place was not in the window of their block."""
        self._begins = {batch.number: batch.begin for batch in parts}
        self._digest = Digest(file.size)
        self._nbytes = sum(batch.end - batch.begin for batch in done)
        self._unsaved = _Unsaved()
        self._loose = 0
        self._saving = Lock()

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes that are not written again, but for late checksums."""
        self.sink.write(data, offset)
        self._digest.add(data, offset)

    def wrote(self, batch: Batch, begun: Begun | None, nbytes: int) -> None:
        """Count a window, after which a large block may have `begun`; wait for the disk now and then."""
        with self._run.lock:
            if begun:
                self.begun[batch.number] = begun
            self._loose += nbytes
            if self._loose < EVERY:
                return
            self._loose = 0
        self.save()

    def finish(
        self, batch: Batch, late: list[tuple[int, bytes]], nonfinite: set[str], taken: set[Storage]
    ) -> None:
        """A batch is written."""
        with self._run.lock:
            self.begun.pop(batch.number, None)
            self._nbytes += batch.end - batch.begin
            self._late += late
            self._unsaved.batches.append(batch.number)
            self._unsaved.late += late
            self._unsaved.nonfinite |= nonfinite
            self._unsaved.taken |= taken

    def is_written(self) -> bool:
        """Whether no batch is left, now that a thread is done with its own."""
        with self._run.lock:
            self.active -= 1
            return not self.active and not self.waiting

    def save(self) -> None:
        """Wait until all that was written is on the disk, and note it."""
        if not self._run.journal.is_open:
            return
        with self._saving:
            with self._run.lock:
                entry = self._entry()
            self.sink.flush()
            self._note(entry)

    def close(self, stopped: Event) -> bool:
        """Write the checksums that are left, make the file durable, and note that it is whole. False if stopped."""
        for place, checksum in self._late:
            self.sink.write(memoryview(checksum), place)
            self._digest.drop(place, len(checksum))
        digest = self._digest.finish(self._run.folder / self._file.path, stopped.is_set)
        if digest is None:
            return False
        modified = self.sink.close()
        self._run.report.digests[self._file.path] = digest
        with self._saving, self._run.lock:
            entry = self._entry()
        self._note({**entry, "bytes": self._file.size, "modified": modified, "digest": digest})
        return True

    def _entry(self) -> dict[str, Any]:
        """What there is to note as soon as it is on the disk."""
        unsaved, self._unsaved = self._unsaved, _Unsaved()
        begun = sum(each.end - self._begins[number] for number, each in self.begun.items())
        return {
            "file": self._file.path,
            "bytes": self._nbytes + begun,
            "batches": unsaved.batches,
            "begun": dict(self.begun),
            "late": [(place, checksum.hex()) for place, checksum in unsaved.late],
            "nonfinite": sorted(unsaved.nonfinite),
            "taken": unsaved.taken,
        }

    def _note(self, entry: dict[str, Any]) -> None:
        taken = entry.pop("taken")
        self._run.journal.add({**entry, **self._run.checks(taken)})


class _Worker:
    """The buffers of one thread."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.files = Files()
        self.gatherer = Gatherer(self.files, run.ledger, run.wide)
        self.buffer = Buffer(WINDOW)

    def close(self) -> None:
        self.files.close()

    def write(self, job: _Job, batch: Batch, stopped: Event) -> bool:
        """Put together one window after another, and write it. False if the batch is not finished."""
        begun = job.begun.get(batch.number)
        streams = [Stream(block, begun) for block in batch.blocks]
        if begun:
            self.run.touch(cells.storage for cells in cells_of(streams[0].view))
        unsigned = deque(streams)
        late, taken = list[tuple[int, bytes]](), set[Storage]()
        limit = self.run.wide if any(map(Stream.is_transposed, streams)) else WINDOW
        for begin, end in batch.windows(limit, begun.end if begun else batch.begin):
            if stopped.is_set():
                return False
            raw = self.buffer.room(end - begin, begin)
            batch.fill(raw, begin, streams, self.gatherer)
            while unsigned and unsigned[0].end <= end:
                stream = unsigned.popleft()
                late += stream.sign(raw, begin)
                taken.update(self.run.note(stream))
            job.write(raw.data, begin)
            self.run.advance(len(raw))
            is_alone = len(streams) == 1 and bool(unsigned)
            job.wrote(batch, streams[0].begun(end) if is_alone else None, len(raw))
        job.finish(batch, late, {each.block.name for each in streams if each.nonfinite}, taken)
        return True
