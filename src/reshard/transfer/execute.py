"""Execute a plan: assemble each file window by window, and write each window once, at its offset.

Work is handed out in batches; each thread takes the file with the fewest writers. Memory is bounded by each thread's
window and what it reads of its sources to pick from, whatever the size of the model.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from threading import Event, Lock

from reshard.algebra.storage import Storage
from reshard.algebra.tensors import cells_of
from reshard.errors import ReshardError
from reshard.transfer.batch import Batch, Stream
from reshard.transfer.files import Files
from reshard.transfer.gather import Gatherer, crc_problem
from reshard.transfer.job import Found, Job
from reshard.transfer.journal import EVERY, Journal, Written
from reshard.transfer.kept import Kept, check_kept
from reshard.transfer.ledger import Ledger, Passed
from reshard.transfer.memory import WINDOW, Share, shared
from reshard.transfer.overflow import Overflow, total
from reshard.transfer.plan import OutputFile, Plan
from reshard.transfer.sink import Buffer, stays_cached
from reshard.transfer.threads import together

AT_RISK = 16
"""All threads together lose at most 1/AT_RISK of an output when the run is killed, if that is at least `LEAST` each."""

LEAST = 16 << 20
"""Bytes of a file that are not worth a wait for the disk."""

PATIENCE = 1.0
"""Seconds that an interrupted run may spend on flushing its progress to disk."""


OnFile = Callable[[str, Event], None]
"""Callback that receives the path of each complete, durable file, also of those that an earlier run has completed.

Long work in it must stop when the event is set.
"""


@dataclass
class Report:
    """Totals: bytes of the output, bytes that an earlier run had written, tensors that contain NaN or Inf.

    `digests` maps the path of each file to its digest. `passed` are the ranges of each source that were read, with
    their CRC32s; None without checksums. `overflowed` are the finite values that a cast made infinite: for each file,
    by tensor and offset of the block.
    """

    nbytes: int = 0
    resumed: int = 0
    nonfinite: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    passed: Passed | None = None
    overflowed: dict[str, dict[tuple[str, int], Overflow]] = field(default_factory=dict)

    def overflows(self) -> dict[str, Overflow]:
        """The finite values that a cast made infinite, by tensor."""
        blocks = (each for found in self.overflowed.values() for each in found.items())
        return total((name, overflow) for (name, _), overflow in blocks)


def execute(
    plan: Plan,
    folder: Path,
    *,
    share: Share | None = None,
    checksum: bool = True,
    on_bytes: Callable[[int], None] = lambda count: None,
    on_file: OnFile = lambda name, stopped: None,
    on_lost: Callable[[int], None] = lambda nbytes: None,
    journal: Journal | None = None,
) -> Report:
    """Write all files of `plan` to `folder`, which exists and contains what `journal` records.

    The thread that completes a file calls `on_file` before it writes another, so the number of files begun and not yet
    handled never exceeds the number of threads.

    Bytes in `folder` that are not as the journal records are written again; `on_lost` receives their number.

    Raises ReshardError if a source is shorter than it was, or if bytes do not have the CRC32 that was recorded for them
    (`checksum` turns this check off). What was written until then stays in `folder` and in the journal.
    """
    make_folders(plan, folder)
    share = share or shared(None, 1 << 30, plan.need)
    journal = journal or Journal()
    kept = check_kept(plan, folder, journal, share.threads)
    if kept.lost:
        on_lost(kept.lost)
    ledger = Ledger(every=True, passed=journal.progress.passed, most=share.ranges) if checksum else None
    plan.sources.ledger = ledger
    run = Run(plan, folder, share, ledger, on_bytes, journal, on_file, kept)
    try:
        together(run.work, share.threads)
    finally:
        run.leave()
    run.settle(plan.sources.sizes())
    return run.report


def make_folders(plan: Plan, folder: Path) -> None:
    """Create the folders of all files of `plan` in `folder`."""
    parents = {parent for file in plan.files for parent in PurePosixPath(file.path).parents}
    for parent in sorted(parents - {PurePosixPath()}):
        # Never create `folder` itself: if someone removed it, no part of it must reappear.
        (folder / parent).mkdir(exist_ok=True)


class Run:
    """The state shared by the threads of one execution."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        share: Share,
        ledger: Ledger | None,
        on_bytes: Callable[[int], None],
        journal: Journal,
        on_file: OnFile = lambda name, stopped: None,
        kept: Kept | None = None,
    ) -> None:
        self.folder = folder
        self.on_bytes, self.on_file = on_bytes, on_file
        self.ledger = ledger
        self.journal = journal
        self.share = share
        total = sum(file.size for file in plan.files)
        self.direct = not stays_cached(total)
        self.every = min(EVERY, max(LEAST, total // AT_RISK // share.threads))
        """Bytes of a file after which the progress is recorded."""
        self._digests = kept.digests if kept else {}
        before = journal.progress
        self.report = Report(before.nbytes, before.nbytes, sorted(before.nonfinite))
        self.report.digests = {path: each.digest for path, each in before.files.items() if each.is_whole}
        self.report.overflowed = {p: dict(each.overflowed) for p, each in before.files.items()}
        self.lock = Lock()
        self.names = dict(before.unchecked)
        self._unchecked = set(before.unchecked)
        self.touch(before.unchecked)
        self.waiting = deque(
            file for file in plan.files if not before.files.get(file.path, Written()).is_whole
        )
        self.adopted = deque(
            path for path, each in before.files.items() if each.is_whole and each.elsewhere is None
        )
        """Complete files of earlier runs, which `on_file` has yet to receive."""
        self._open: list[Job] = []  # with batches left to take
        self._unfinished: set[Job] = set()

    def work(self, index: int, stopped: Event) -> None:
        """Take batches until none are left."""
        worker = _Worker(self)
        try:
            while not stopped.is_set() and (path := self._adopt()):
                self.on_file(path, stopped)
            while not stopped.is_set() and (taken := self._take()):
                job, batch = taken
                if (batch is None or worker.write(job, batch, stopped)) and job.is_written():
                    self.end(job, stopped)
        finally:
            worker.close()

    def _adopt(self) -> str | None:
        """A complete file of an earlier run."""
        with self.lock:
            return self.adopted.popleft() if self.adopted else None

    def _take(self) -> tuple[Job, Batch | None] | None:
        """The next batch, of the open file with the fewest writers, or of a new file; None if that has none left."""
        with self.lock:
            job = min(self._open, key=lambda job: job.active, default=None)
            if (job is None or job.active) and self.waiting:
                job = self.begin(self.waiting.popleft())
                self._open.append(job)
                self._unfinished.add(job)
            if job is None:
                return None
            batch = job.waiting.pop() if job.waiting else None
            job.active += 1
            if not job.waiting:
                self._open.remove(job)
            return job, batch

    def begin(self, file: OutputFile) -> Job:
        """The remaining work on a file."""
        before = self.journal.progress.files.get(file.path, Written())
        return Job(self, file, before, digest=self._digests.pop(file.path, None))

    def end(self, job: Job, stopped: Event) -> None:
        """Finish a file whose batches are all written, and call `on_file`, unless stopped."""
        if not stopped.is_set():
            job.close()
            self._unfinished.discard(job)
            self.on_file(job.path, stopped)

    def note(self, stream: Stream) -> list[Storage]:
        """Record what a finished block showed; return the storages that it was read from, if they have checksums."""
        name = stream.block.name
        storages = [cells.storage for cells in cells_of(stream.view)]
        with self.lock:
            if stream.nonfinite and name not in self.report.nonfinite:
                self.report.nonfinite.append(name)
            for storage in storages:
                self.names.setdefault(storage, name)
        return [storage for storage in storages if storage.crc32 is not None]

    def touch(self, storages: Iterable[Storage]) -> None:
        """Have storages checked in full at the end, because an earlier run has read parts of them."""
        if self.ledger:
            for storage in storages:
                self.ledger.touch(storage)

    def checks(self, taken: set[Storage]) -> tuple[dict[Storage, str], list[Storage]]:
        """Checksums for the journal to record once a file contains data from the storages `taken`.

        Returns the storages that are yet to be checked, each with the name of a tensor in it, and those that were
        checked.
        """
        if self.ledger is None or not self.journal.is_open:
            return {}, []
        with self.lock:
            later = [each for each in taken - self._unchecked if not self.ledger.is_right(each)]
            checked = [each for each in self._unchecked if self.ledger.is_right(each)]
            return {each: self.names.get(each, "") for each in later}, checked

    def note_checks(self, later: Iterable[Storage], checked: Iterable[Storage]) -> None:
        """Remember that the journal has recorded these checksums."""
        with self.lock:
            self._unchecked.update(later)
            self._unchecked.difference_update(checked)

    def advance(self, nbytes: int) -> None:
        """Count bytes that were written."""
        with self.lock:
            self.report.nbytes += nbytes
        self.on_bytes(nbytes)

    def leave(self) -> None:
        """Record the progress of each unfinished file, as far as the disk and the time allow, and close it."""
        deadline = time.monotonic() + PATIENCE
        for job in self._unfinished:
            with suppress(OSError):
                if time.monotonic() < deadline:
                    job.save()
            job.abandon()

    def settle(self, sizes: Mapping[str, int]) -> None:
        """Compare all checksums; raises ReshardError with every damaged tensor. `sizes` are those of the sources."""
        self.report.nonfinite.sort()
        if self.ledger is None:
            return
        files = Files()
        try:
            wrong = self.ledger.settle(files)
            if not wrong:
                self.ledger.complete(files, sizes)
        finally:
            files.close()
        self.report.passed = self.ledger.passed
        if wrong:
            raise ReshardError([crc_problem(storage, self.names.get(storage)) for storage in wrong])


class _Worker:
    """The buffers of one thread."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.files = Files()
        self.gatherer = Gatherer(self.files, run.ledger, run.share.gathering)
        self.buffer = Buffer(WINDOW)

    def close(self) -> None:
        self.files.close()

    def write(self, job: Job, batch: Batch, stopped: Event) -> bool:
        """Assemble and write one window after another. Returns False if the batch is not finished."""
        begun = job.begun.get(batch.number)
        streams = [Stream(block, begun) for block in batch.blocks]
        if begun:
            self.run.touch(cells.storage for cells in cells_of(streams[0].view))
        unsigned = deque(streams)
        found = Found([batch.number], batch.end - batch.begin)
        limit = self.run.share.wide if any(map(Stream.is_transposed, streams)) else WINDOW
        for begin, end in batch.windows(limit, begun.end if begun else batch.begin):
            if stopped.is_set():
                return False
            raw = self.buffer.room(end - begin, begin)
            batch.fill(raw, begin, streams, self.gatherer)
            while unsigned and unsigned[0].end <= end:
                stream = unsigned.popleft()
                found.late += stream.sign(raw, begin)
                found.taken.update(self.run.note(stream))
            job.write(raw.data, begin)
            self.run.advance(len(raw))
            is_alone = len(streams) == 1 and bool(unsigned)
            job.wrote(batch, streams[0].begun(end) if is_alone else None, len(raw), self.gatherer)
        found.passed = self.gatherer.take_passed()
        found.nonfinite.update(each.block.name for each in streams if each.nonfinite)
        places = {(each.block.name, each.block.offset): each.overflow for each in streams}
        found.overflowed.update({place: lost for place, lost in places.items() if lost})
        job.finish(found)
        return True
