"""Run a plan: windows of each block are gathered into a small buffer and written at their final offset.

Work is handed out block by block, each thread on the file that fewest others are writing. Memory is bounded
by the window of each thread and what it maps of its sources, whatever the size of the model.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock
from typing import Any

import numpy as np
from isal.isal_zlib import crc32

from reshard.checkpoint import cells_of
from reshard.dtypes import DType
from reshard.errors import ReshardError
from reshard.gather import RAW, Files, Gatherer, Ledger, crc_problem
from reshard.plan import Block, OutputFile, Plan
from reshard.sink import PAGE, Buffer, Sink
from reshard.views import View

WINDOW = 4 << 20
"""Bytes gathered at a time: small enough for the cache, large enough for the disk."""

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
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Report:
    """Write all files of `plan` below `folder`, which exists and is empty.

    Raises ReshardError if a source is shorter than it was, or if bytes do not have the CRC32 that was
    recorded for them. What was written until then stays in `folder`, for the caller to remove.
    """
    run = _Run(plan, folder, memory, on_bytes)
    threads = worker_count(workers, memory)
    with ThreadPoolExecutor(threads, thread_name_prefix="reshard") as pool:
        futures = [pool.submit(run.work) for _ in range(threads)]
        try:
            while True:
                done, pending = wait(futures, timeout=0.2, return_when=FIRST_EXCEPTION)
                if not pending or any(future.exception() for future in done):
                    break
        finally:
            run.stopped.set()
        for future in futures:
            future.result()
    run.settle()
    return run.report


class _Run:
    """The state that the threads of one execution share."""

    def __init__(self, plan: Plan, folder: Path, memory: int, on_bytes: Callable[[int], None]) -> None:
        self.folder = folder
        self.on_bytes = on_bytes
        self.ledger = Ledger()
        self.report = Report()
        self.stopped = Event()
        self.wide = min(WIDE_WINDOW, max(WINDOW, memory // 4))
        self._lock = Lock()
        self._names: dict[Any, str] = {}
        self._waiting = deque(plan.files)
        self._open: list[_Job] = []  # with blocks that nobody has taken

    def work(self) -> None:
        """Take blocks until there are none left."""
        worker = _Worker(self)
        try:
            while not self.stopped.is_set() and (taken := self._take()):
                job, block = taken
                if block is not None:
                    worker.write(job, block)
                if job.finished(self._lock):
                    job.sink.close()
        finally:
            worker.close()

    def _take(self) -> tuple[_Job, Block | None] | None:
        """The next block, of the open file with the fewest writers, or of a new file."""
        with self._lock:
            job = min(self._open, key=lambda job: job.active, default=None)
            if (job is None or job.active) and self._waiting:
                job = _Job(self._waiting.popleft(), self.folder)
                self._open.append(job)
            if job is None:
                return None
            block = job.waiting.pop() if job.waiting else None
            job.active += 1
            if not job.waiting:
                self._open.remove(job)
            return job, block

    def note(self, block: Block, nonfinite: bool, storages: set[Any]) -> None:
        """Keep what one finished block showed."""
        with self._lock:
            self.report.nbytes += block.nbytes
            if nonfinite and block.name not in self.report.nonfinite:
                self.report.nonfinite.append(block.name)
            for storage in storages:
                self._names.setdefault(storage, block.name)

    def settle(self) -> None:
        """Compare all checksums; every damaged tensor is named."""
        self.report.nonfinite.sort()
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
        for offset, content in file.literals():
            self.sink.write(memoryview(content), offset)
        self.waiting = file.blocks[::-1]
        self.active = 0

    def finished(self, lock: Lock) -> bool:
        with lock:
            self.active -= 1
            return not self.active and not self.waiting


class _Worker:
    """The buffers of one thread."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.files = Files()
        self.gatherer = Gatherer(self.files, run.ledger, run.wide)
        self.buffer = Buffer(WINDOW)

    def close(self) -> None:
        self.files.close()

    def write(self, job: _Job, block: Block) -> None:
        """Gather one block window by window, and write it, its checksum last."""
        view, size = block.source(), block.dtype.itemsize
        window = self.run.wide if _is_transposed(view) else WINDOW
        checksum, nonfinite = 0, False
        begin = 0
        while begin < view.numel:
            if self.run.stopped.is_set():
                return
            offset = block.offset + begin * size
            # All windows but the last end where a page does.
            end = min(view.numel, begin + (window - offset % PAGE) // size)
            pieces = view.pieces if end - begin == view.numel else view.window(begin, end)
            raw = self.buffer.room((end - begin) * size, offset)
            self.gatherer.fill(pieces, block.dtype, raw.view(RAW[size]))
            nonfinite = nonfinite or has_nonfinite(raw, block.dtype)
            if block.crc_at:
                checksum = crc32(raw.data, checksum)
            job.sink.write(raw.data, offset)
            self.run.on_bytes(len(raw))
            begin = end
        for place in block.crc_at:
            job.sink.write(memoryview(checksum.to_bytes(4, "little")), place)
        storages = {cells.storage for cells in cells_of(view)}
        self.run.note(block, nonfinite, storages)


def has_nonfinite(raw: np.ndarray[Any, Any], dtype: DType) -> bool:
    """Whether an element is NaN or Inf, that is, whether an exponent is all ones.

    Read as integers, such elements are the largest: the positive ones if the bits are signed, the negative
    ones if they are not. Two maxima run at cache speed, where masks and comparisons would not.
    """
    if not dtype.exponent or not raw.size:
        return False
    bits, sign = raw.view(RAW[dtype.itemsize]), 1 << (8 * dtype.itemsize - 1)
    signed = bits.view(f"i{dtype.itemsize}")
    return bool(signed.max() >= dtype.exponent or bits.max() >= sign | dtype.exponent)


def _is_transposed(view: View) -> bool:
    """Whether neighbours in the target are no neighbours in the source."""
    return any(piece.axes and piece.axes[-1][1] != 1 for piece in view.pieces)
