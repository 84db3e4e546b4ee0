"""Run a plan: each file is put together window by window, and each window is written once, at its place.

Work is handed out in batches, each thread on the file that fewest others are writing. Memory is bounded by the window
of each thread and what it reads of its sources to pick from, whatever the size of the model.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from threading import Event, Lock
from typing import Any

from reshard.algebra.tensors import cells_of
from reshard.errors import ReshardError
from reshard.transfer.batch import WINDOW, Batch, Stream, batches
from reshard.transfer.gather import Files, Gatherer, Ledger, crc_problem
from reshard.transfer.plan import OutputFile, Plan
from reshard.transfer.sink import Buffer, Sink
from reshard.transfer.threads import together

WIDE_WINDOW = 32 << 20
"""The same where a tensor is transposed, so that one read of its source serves many rows."""


@dataclass
class Report:
    """What passed: bytes written, and the tensors that hold NaN or Inf."""

    nbytes: int = 0
    nonfinite: list[str] = field(default_factory=list)


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
) -> Report:
    """Write all files of `plan` below `folder`, which exists and is empty.

    Raises ReshardError if a source is shorter than it was, or if bytes do not have the CRC32 that was
    recorded for them, which `checksum` turns off. What was written until then stays in `folder`, for the caller to
    remove.
    """
    parents = {parent for file in plan.files for parent in PurePosixPath(file.path).parents}
    for parent in sorted(parents - {PurePosixPath()}):
        (folder / parent).mkdir()  # never `folder` itself: whoever removes it shall not get a part of it back
    run = _Run(plan, folder, memory, Ledger() if checksum else None, on_bytes)
    together(run.work, worker_count(workers, memory))
    run.settle()
    return run.report


class _Run:
    """The state that the threads of one execution share."""

    def __init__(
        self, plan: Plan, folder: Path, memory: int, ledger: Ledger | None, on_bytes: Callable[[int], None]
    ) -> None:
        self.folder = folder
        self.on_bytes = on_bytes
        self.ledger = ledger
        self.report = Report()
        self.wide = min(WIDE_WINDOW, max(WINDOW, memory // 4))
        self._lock = Lock()
        self._names: dict[Any, str] = {}
        self._waiting = deque(plan.files)
        self._open: list[_Job] = []  # with batches that nobody has taken

    def work(self, index: int, stopped: Event) -> None:
        """Take batches until there are none left."""
        worker = _Worker(self)
        try:
            while not stopped.is_set() and (taken := self._take()):
                job, batch = taken
                worker.write(job, batch, stopped)
                if job.finished(self._lock):
                    job.close()
        finally:
            worker.close()

    def _take(self) -> tuple[_Job, Batch] | None:
        """The next batch, of the open file with the fewest writers, or of a new file."""
        with self._lock:
            job = min(self._open, key=lambda job: job.active, default=None)
            if (job is None or job.active) and self._waiting:
                job = _Job(self._waiting.popleft(), self.folder)
                self._open.append(job)
            if job is None:
                return None
            batch = job.waiting.pop()
            job.active += 1
            if not job.waiting:
                self._open.remove(job)
            return job, batch

    def note(self, stream: Stream) -> None:
        """Keep what one finished block showed."""
        name = stream.block.name
        with self._lock:
            if stream.nonfinite and name not in self.report.nonfinite:
                self.report.nonfinite.append(name)
            for cells in cells_of(stream.view):
                self._names.setdefault(cells.storage, name)

    def advance(self, nbytes: int) -> None:
        """Count what was written."""
        with self._lock:
            self.report.nbytes += nbytes
        self.on_bytes(nbytes)

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


class _Job:
    """An output file while it is being written."""

    def __init__(self, file: OutputFile, folder: Path) -> None:
        self.sink = Sink(folder / file.path, file.size)
        self.waiting = list(batches(file))[::-1]
        self.active = 0
        self.late: list[tuple[int, bytes]] = []
        """Checksums whose place was not in the window of their block."""

    def finished(self, lock: Lock) -> bool:
        with lock:
            self.active -= 1
            return not self.active and not self.waiting

    def close(self) -> None:
        for place, checksum in self.late:
            self.sink.write(memoryview(checksum), place)
        self.sink.close()


class _Worker:
    """The buffers of one thread."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.files = Files()
        self.gatherer = Gatherer(self.files, run.ledger, run.wide)
        self.buffer = Buffer(WINDOW)

    def close(self) -> None:
        self.files.close()

    def write(self, job: _Job, batch: Batch, stopped: Event) -> None:
        """Put together one window after another, and write it."""
        streams = [Stream(block) for block in batch.blocks]
        unsigned = deque(streams)
        limit = self.run.wide if any(map(Stream.is_transposed, streams)) else WINDOW
        for begin, end in batch.windows(limit):
            if stopped.is_set():
                return
            raw = self.buffer.room(end - begin, begin)
            batch.fill(raw, begin, streams, self.gatherer)
            while unsigned and unsigned[0].end <= end:
                stream = unsigned.popleft()
                job.late += stream.sign(raw, begin)
                self.run.note(stream)
            job.sink.write(raw.data, begin)
            self.run.advance(len(raw))
