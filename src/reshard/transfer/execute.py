"""Run a plan: each file is put together window by window, and each window is written once, at its place.

Work is handed out in batches, each thread on the file that fewest others are writing. Memory is bounded by the window
of each thread and what it reads of its sources to pick from, whatever the size of the model.
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
from reshard.transfer.journal import Journal, Written
from reshard.transfer.ledger import Ledger, Passed
from reshard.transfer.memory import WINDOW, Share, shared
from reshard.transfer.plan import OutputFile, Plan
from reshard.transfer.sink import Buffer, stays_cached
from reshard.transfer.threads import together

PATIENCE = 1.0
"""Seconds for which a run that is interrupted waits for the disk, to keep more than it must."""


OnFile = Callable[[str, Event], None]
"""Hears the path of a file that is whole and durable; what it does for long it gives up when the event is set."""


@dataclass
class Report:
    """What passed: bytes of the output, how many of them an earlier run had written, tensors that hold NaN or Inf.

    `digests` are those of all files, by their paths. `passed` are the ranges of each source that were read, with their
    CRC32s; None without checksums.
    """

    nbytes: int = 0
    resumed: int = 0
    nonfinite: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    passed: Passed | None = None


def execute(
    plan: Plan,
    folder: Path,
    *,
    share: Share | None = None,
    checksum: bool = True,
    on_bytes: Callable[[int], None] = lambda count: None,
    on_file: OnFile = lambda name, stopped: None,
    journal: Journal | None = None,
) -> Report:
    """Write all files of `plan` below `folder`, which exists, and holds what `journal` says that it does.

    The thread that has finished a file calls `on_file` before it writes another, so no more files are begun and not
    taken care of than there are threads.

    Raises ReshardError if a source is shorter than it was, or if bytes do not have the CRC32 that was
    recorded for them, which `checksum` turns off. What was written until then stays in `folder`, and is in the journal.
    """
    make_folders(plan, folder)
    share = share or shared(None, 1 << 30, plan.need)
    journal = journal or Journal()
    ledger = Ledger(every=True, passed=journal.progress.passed, most=share.ranges) if checksum else None
    run = Run(plan, folder, share, ledger, on_bytes, journal, on_file)
    try:
        together(run.work, share.threads)
    finally:
        run.leave()
    run.settle(plan.sources.sizes())
    return run.report


def make_folders(plan: Plan, folder: Path) -> None:
    """Make the folders of all files of `plan` below `folder`."""
    parents = {parent for file in plan.files for parent in PurePosixPath(file.path).parents}
    for parent in sorted(parents - {PurePosixPath()}):
        # Never `folder` itself: whoever removes it shall not get a part of it back.
        (folder / parent).mkdir(exist_ok=True)


class Run:
    """The state that the threads of one execution share."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        share: Share,
        ledger: Ledger | None,
        on_bytes: Callable[[int], None],
        journal: Journal,
        on_file: OnFile = lambda name, stopped: None,
    ) -> None:
        self.folder = folder
        self.on_bytes, self.on_file = on_bytes, on_file
        self.ledger = ledger
        self.journal = journal
        self.share = share
        self.direct = not stays_cached(sum(file.size for file in plan.files))
        before = journal.progress
        self.report = Report(before.nbytes, before.nbytes, sorted(before.nonfinite))
        self.report.digests = {path: each.digest for path, each in before.files.items() if each.is_whole}
        self.lock = Lock()
        self.names = dict(before.unchecked)
        self._unchecked = set(before.unchecked)
        self.touch(before.unchecked)
        self.waiting = deque(
            file for file in plan.files if not before.files.get(file.path, Written()).is_whole
        )
        self._open: list[Job] = []  # with batches that nobody has taken
        self._unfinished: set[Job] = set()

    def work(self, index: int, stopped: Event) -> None:
        """Take batches until there are none left."""
        worker = _Worker(self)
        try:
            while not stopped.is_set() and (taken := self._take()):
                job, batch = taken
                if worker.write(job, batch, stopped) and job.is_written():
                    self.end(job, stopped)
        finally:
            worker.close()

    def _take(self) -> tuple[Job, Batch] | None:
        """The next batch, of the open file with the fewest writers, or of a new file."""
        with self.lock:
            job = min(self._open, key=lambda job: job.active, default=None)
            if (job is None or job.active) and self.waiting:
                job = self.begin(self.waiting.popleft())
                self._open.append(job)
                self._unfinished.add(job)
            if job is None:
                return None
            batch = job.waiting.pop()
            job.active += 1
            if not job.waiting:
                self._open.remove(job)
            return job, batch

    def begin(self, file: OutputFile) -> Job:
        """What is left to do of a file."""
        return Job(self, file, self.journal.progress.files.get(file.path, Written()))

    def end(self, job: Job, stopped: Event) -> None:
        """Do what is left once all batches of a file are written, and have it taken care of, unless stopped."""
        if job.close(stopped):
            self._unfinished.discard(job)
            self.on_file(job.path, stopped)

    def note(self, stream: Stream) -> list[Storage]:
        """Keep what one finished block showed; return the storages that it was read from, if they have checksums."""
        name = stream.block.name
        storages = [cells.storage for cells in cells_of(stream.view)]
        with self.lock:
            if stream.nonfinite and name not in self.report.nonfinite:
                self.report.nonfinite.append(name)
            for storage in storages:
                self.names.setdefault(storage, name)
        return [storage for storage in storages if storage.crc32 is not None]

    def touch(self, storages: Iterable[Storage]) -> None:
        """Have storages checked whole at the end: an earlier run has taken something of them."""
        if self.ledger:
            for storage in storages:
                self.ledger.touch(storage)

    def checks(self, taken: set[Storage]) -> tuple[dict[Storage, str], list[Storage]]:
        """What the journal has to say of checksums once a file holds what was `taken`.

        These are the storages that have yet to be checked, each with a tensor that has it, and those that were.
        """
        if self.ledger is None or not self.journal.is_open:
            return {}, []
        with self.lock:
            later = [each for each in taken - self._unchecked if not self.ledger.is_right(each)]
            checked = [each for each in self._unchecked if self.ledger.is_right(each)]
            return {each: self.names.get(each, "") for each in later}, checked

    def note_checks(self, later: Iterable[Storage], checked: Iterable[Storage]) -> None:
        """The journal says so now."""
        with self.lock:
            self._unchecked.update(later)
            self._unchecked.difference_update(checked)

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
            job.abandon()

    def settle(self, sizes: Mapping[str, int]) -> None:
        """Compare all checksums; every damaged tensor is named. `sizes` are those of the sources."""
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
        """Put together one window after another, and write it. False if the batch is not finished."""
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
        job.finish(found)
        return True
