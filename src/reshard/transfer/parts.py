"""Parts of a plan that can be executed anywhere: what a worker receives, and what it returns."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from reshard.algebra.storage import Storage
from reshard.errors import listed, size
from reshard.transfer.digests import Seen
from reshard.transfer.execute import Run
from reshard.transfer.job import Found, Job
from reshard.transfer.journal import Begun, Journal, Written
from reshard.transfer.ledger import CELL, Ledger, Passed
from reshard.transfer.memory import Share
from reshard.transfer.plan import OutputFile, Plan
from reshard.transfer.threads import together


@dataclass
class Part:
    """Batches of some files, by their numbers in each file; `nbytes` are left to write.

    `begun` are large blocks that an earlier run has written up to some byte.
    """

    number: int
    nbytes: int = 0
    batches: dict[str, list[int]] = field(default_factory=dict)
    begun: dict[str, dict[int, Begun]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{size(self.nbytes)} of {listed(list(self.batches), 3)}"


@dataclass
class Outcome:
    """What a worker found in a part that is on disk now, or the `error` that it failed with.

    `files` maps each path to what its batches found and the digests of its bytes; `passed` are the CRC32s of what was
    read, and `names` gives a tensor for each storage if known.
    """

    host: str = field(default_factory=socket.gethostname)
    files: dict[str, tuple[Found, Seen]] = field(default_factory=dict)
    passed: Passed = field(default_factory=dict)
    names: Mapping[Storage, str] = field(default_factory=dict)
    error: Exception | None = None


class StoppedError(Exception):
    """The run no longer needs the part."""


def cut(jobs: Iterable[Job], most: int) -> Iterator[Part]:
    """Cut jobs into parts of about `most` bytes; a batch is never cut. Takes the jobs' waiting batches."""
    part = Part(0)
    for job in jobs:
        waiting, job.waiting = job.waiting[::-1], []
        for batch in waiting:
            begun = job.begun.get(batch.number)
            nbytes = batch.end - (begun.end if begun else batch.begin)
            if part.batches and part.nbytes + nbytes > most:
                yield part
                part = Part(part.number + 1)
            if job.path not in part.batches:
                part.batches[job.path] = []
                job.active += 1
            part.batches[job.path].append(batch.number)
            part.nbytes += nbytes
            if begun:
                part.begun.setdefault(job.path, {})[batch.number] = begun
    if part.batches:
        yield part


def execute_part(
    plan: Plan,
    folder: Path,
    part: Part,
    is_stopped: Callable[[], bool],
    *,
    share: Share,
    checksum: bool,
) -> Outcome:
    """Write the batches of a part to `folder`, which has the parents of its files, and wait for the disk.

    Raises StoppedError if `is_stopped` returns true, and what `execute` raises.
    """

    def on_bytes(count: int) -> None:
        if is_stopped():
            raise StoppedError

    ledger = Ledger(every=True, apart=CELL, most=share.ranges) if checksum else None
    run = _PartRun(plan, folder, part, share, ledger, on_bytes)
    try:
        together(run.work, share.threads)
    finally:
        run.leave()
    return run.outcome()


class _PartRun(Run):
    """The state of the threads that work on one part."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        part: Part,
        share: Share,
        ledger: Ledger | None,
        on_bytes: Callable[[int], None],
    ) -> None:
        super().__init__(plan, folder, share, ledger, on_bytes, Journal())
        self.waiting = deque(file for file in self.waiting if file.path in part.batches)
        self._part = part
        self._done: dict[str, tuple[Found, Seen]] = {}

    def begin(self, file: OutputFile) -> Job:
        """The batches of a file that belong to the part."""
        before = Written(begun=self._part.begun.get(file.path, {}))
        return Job(self, file, before, set(self._part.batches[file.path]))

    def end(self, job: Job, stopped: Event) -> None:
        """Flush a file to disk; other workers write to it too, and the main process completes it."""
        job.sink.flush()
        job.abandon()
        with self.lock:
            self._done[job.path] = job.unsaved, job.digest.seen()
        self._unfinished.discard(job)

    def outcome(self) -> Outcome:
        """What the part has found."""
        passed = self.ledger.passed if self.ledger else {}
        return Outcome(files=self._done, passed=passed, names=self.names)
