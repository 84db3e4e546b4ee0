"""Execute a plan: assemble each file window by window, and write each window once, at its offset.

Work is handed out in batches; each thread takes the file with the fewest writers. Memory is bounded by each thread's
window and what it reads of its sources to pick from, whatever the size of the model.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from threading import Event
from types import TracebackType

from reshard.algebra.tensors import cells_of
from reshard.base.shared_options import MemoryOption
from reshard.transfer.batch import Batch, BlockState
from reshard.transfer.file_job import FileJob, continued
from reshard.transfer.gather import Gatherer
from reshard.transfer.journal import Journal
from reshard.transfer.memory_budget import WINDOW_BYTES, ThreadShare, shared
from reshard.transfer.plan import OutputFile, Plan
from reshard.transfer.run_state import RunState, RunTotals, SourceReads, opened
from reshard.transfer.sink import PageBuffer
from reshard.transfer.thread_files import OpenFiles
from reshard.transfer.threads import taken, together
from reshard.transfer.written_file import WrittenFile

FLUSH_SECONDS = 1.0
"""Seconds that an interrupted run may spend on flushing its progress to disk."""


OnFile = Callable[[str, Event], None]
"""Callback that receives the path of each complete, durable file, also of those that an earlier run has completed.

Long work in it must stop when the event is set.
"""


def execute(
    plan: Plan,
    folder: Path,
    *,
    share: ThreadShare | None = None,
    checksum: bool = True,
    on_bytes: Callable[[int], None] = lambda count: None,
    on_file: OnFile = lambda name, stopped: None,
    on_lost: Callable[[int], None] = lambda nbytes: None,
    journal: Journal | None = None,
) -> RunTotals:
    """Write all files of `plan` to `folder`, which exists and contains what `journal` records.

    The thread that completes a file calls `on_file` before it writes another, so the number of files begun and not yet
    handled never exceeds the number of threads.

    Bytes in `folder` that are not as the journal records are written again; `on_lost` receives their number.

    Raises ReshardError if a source is shorter than it was, or if bytes do not have the CRC32 that was recorded for them
    (`checksum` turns this check off). What was written until then stays in `folder` and in the journal.
    """
    share = share or shared(None, MemoryOption().limit, plan.need)
    state = opened(
        plan, folder, share, journal or Journal(), checksum=checksum, on_bytes=on_bytes, on_lost=on_lost
    )
    whole, left = divided(state)
    finished = deque(whole)
    queue = Queue(state, left, lambda file: continued(state, file), FileJob.close, on_file)

    def work(index: int, stopped: Event) -> None:
        for path in taken(finished, stopped):
            on_file(path, stopped)
        queue.work(stopped)

    with queue:
        together(work, share.threads)
    return state.settle()


def divided(state: RunState) -> tuple[list[str], list[OutputFile]]:
    """The paths of files that an earlier run has completed and that are still here, and the files that it has not."""
    whole = {path: each for path, each in state.files.items() if each.is_whole}
    here = [path for path, each in whole.items() if each.elsewhere is None]
    return here, [file for file in state.plan.files if file.path not in whole]


class Queue:
    """Files with batches to write, handed out to threads: each takes the file with the fewest writers.

    `begin` makes the job of a file when its turn comes. Once all batches of a job are written, `close` receives it and
    `on_file` its path, in the thread that wrote the last one. At the end of a `with` block, the progress of unfinished
    files is recorded, as far as the disk and the time allow.
    """

    def __init__(
        self,
        state: RunState,
        files: Iterable[OutputFile],
        begin: Callable[[OutputFile], FileJob],
        close: Callable[[FileJob], None],
        on_file: OnFile = lambda name, stopped: None,
    ) -> None:
        self._state, self._waiting = state, deque(files)
        self._begin, self._close, self._on_file = begin, close, on_file
        self._open: list[FileJob] = []  # with batches left to take
        self._unfinished: set[FileJob] = set()

    def work(self, stopped: Event) -> None:
        """Write batches until none are left."""
        worker = _WriterThread(self._state)
        try:
            while not stopped.is_set() and (taken := self._take()):
                job, batch = taken
                if (batch is None or worker.write(job, batch, stopped)) and job.is_written():
                    self._finish(job, stopped)
        finally:
            worker.close()

    def _take(self) -> tuple[FileJob, Batch | None] | None:
        """The next batch, of the open file with the fewest writers, or of a new file; None if that has none left."""
        with self._state.lock:
            job = min(self._open, key=lambda job: job.active, default=None)
            if (job is None or job.active) and self._waiting:
                job = self._begin(self._waiting.popleft())
                self._open.append(job)
                self._unfinished.add(job)
            if job is None:
                return None
            batch = job.waiting.pop() if job.waiting else None
            job.active += 1
            if not job.waiting:
                self._open.remove(job)
            return job, batch

    def _finish(self, job: FileJob, stopped: Event) -> None:
        if not stopped.is_set():
            self._close(job)
            self._unfinished.discard(job)
            self._on_file(job.path, stopped)

    def __enter__(self) -> Queue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        deadline = time.monotonic() + FLUSH_SECONDS
        for job in self._unfinished:
            with suppress(OSError):
                if time.monotonic() < deadline:
                    job.save()
            job.abandon()


class _WriterThread:
    """The buffers of one thread."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.files = OpenFiles()
        self.gatherer = Gatherer(self.files, state.ledger, state.share.gathering, state.windows)
        self.buffer = PageBuffer(WINDOW_BYTES)

    def close(self) -> None:
        self.files.close()

    def write(self, job: FileJob, batch: Batch, stopped: Event) -> bool:
        """Assemble and write one window after another. Returns False if the batch is not finished."""
        begun = job.written.begun.get(batch.number)
        streams = [BlockState(block, begun) for block in batch.blocks]
        if begun:
            self.state.touch(cells.storage for cells in cells_of(streams[0].view))
        unsigned = deque(streams)
        written, read = WrittenFile(batch.end - batch.begin, {batch.number}), SourceReads()
        limit = self.state.share.wide if any(map(BlockState.is_transposed, streams)) else WINDOW_BYTES
        for begin, end in batch.windows(limit, begun.end if begun else batch.begin):
            if stopped.is_set():
                return False
            raw = self.buffer.array(end - begin, begin)
            batch.fill(raw, begin, streams, self.gatherer)
            while unsigned and unsigned[0].end <= end:
                stream = unsigned.popleft()
                written.late += stream.sign(raw, begin)
                read.storages.update(self.state.name_storages(stream))
            job.write(raw.data, begin)
            self.state.advance(len(raw))
            is_alone = len(streams) == 1 and bool(unsigned)
            job.wrote(
                batch, streams[0].begun(batch.begin, end) if is_alone else None, len(raw), self.gatherer
            )
        read.ranges = self.gatherer.take_passed()
        written.nonfinite.update(each.block.name for each in streams if each.nonfinite)
        places = {(each.block.name, each.block.offset): each.overflow for each in streams}
        written.overflowed.update({place: lost for place, lost in places.items() if lost})
        job.finish(written, read)
        return True
