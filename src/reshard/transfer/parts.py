"""A plan cut in parts that can be done anywhere: what is asked of a worker, and what it tells of it."""

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
    """Batches of some files, by the numbers that they have there; `nbytes` are left to write.

    `begun` are large blocks that an earlier run has written to some byte.
    """

    number: int
    nbytes: int = 0
    batches: dict[str, list[int]] = field(default_factory=dict)
    begun: dict[str, dict[int, Begun]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{size(self.nbytes)} of {listed(list(self.batches), 3)}"


@dataclass
class Outcome:
    """What a worker has found in a part that is on the disk now, or the `error` that kept it from that.

    `files` has, by path, what its batches have shown and the digests of its bytes; `passed` are the CRC32s of what was
    read, and `names` a tensor for each storage of which that is known.
    """

    host: str = field(default_factory=socket.gethostname)
    files: dict[str, tuple[Found, Seen]] = field(default_factory=dict)
    passed: Passed = field(default_factory=dict)
    names: Mapping[Storage, str] = field(default_factory=dict)
    error: Exception | None = None


class StoppedError(Exception):
    """Whoever asked for a part does not want it any more."""


def cut(jobs: Iterable[Job], most: int) -> Iterator[Part]:
    """Parts of about `most` bytes, each of batches side by side; a batch is never cut. Takes what waits in the jobs."""
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
    """Write the batches of a part below `folder`, where the parents of its files are, and wait for the disk.

    Raises StoppedError when `is_stopped` says so, and what `execute` raises.
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
        """The batches that the part has of a file."""
        before = Written(begun=self._part.begun.get(file.path, {}))
        return Job(self, file, before, set(self._part.batches[file.path]))

    def end(self, job: Job, stopped: Event) -> None:
        """Have a file on the disk; others write to it, and somebody else ends it."""
        job.sink.flush()
        job.abandon()
        with self.lock:
            self._done[job.path] = job.unsaved, job.digest.seen()
        self._unfinished.discard(job)

    def outcome(self) -> Outcome:
        """What the part has shown."""
        passed = self.ledger.passed if self.ledger else {}
        return Outcome(files=self._done, passed=passed, names=self.names)
