"""Parts of a plan that can be executed anywhere: what a worker receives, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from reshard.algebra.storage import Storage
from reshard.base.errors import listed
from reshard.base.quantities import size
from reshard.transfer.digests import SeenCells
from reshard.transfer.execute import Queue
from reshard.transfer.file_job import FileJob
from reshard.transfer.journal import Journal
from reshard.transfer.ledger import CELL_BYTES, ByteRanges, Ledger, Passed
from reshard.transfer.memory_budget import ThreadShare
from reshard.transfer.plan import OutputFile, Plan
from reshard.transfer.run_state import RunState, SourceReads
from reshard.transfer.written_file import BegunBlock, WrittenFile

MIN_PART_BYTES = 64 << 20
"""Least bytes of a part: less would take longer to claim, open and flush than to write."""

MAX_PART_BYTES = 1 << 30
"""Most bytes of a part, unless one tensor has more: what a worker loses if it is killed."""

ROUND_DIVISOR = 6
"""All pullers together take 1/ROUND_DIVISOR of what is left, in one part each."""


@dataclass
class PlanPart:
    """Batches of some files, by their numbers in each file; `nbytes` are left to write.

    `begun` are large blocks that an earlier run has written up to some byte.
    """

    nbytes: int = 0
    batches: dict[str, list[int]] = field(default_factory=dict)
    begun: dict[str, dict[int, BegunBlock]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{size(self.nbytes)} of {listed(list(self.batches), 3)}"


@dataclass
class PartOutcome:
    """What a worker found in a part that is on disk now.

    `files` maps each path to what is written of it and the digests of its bytes; `read` has the CRC32s of what was
    read, joined in `runs`, and `names` gives a tensor for each storage if known.
    """

    files: dict[str, tuple[WrittenFile, SeenCells]] = field(default_factory=dict)
    read: SourceReads = field(default_factory=SourceReads)
    runs: Passed = field(default_factory=dict)
    names: Mapping[Storage, str] = field(default_factory=dict)


class PartStoppedError(Exception):
    """The run no longer needs the part."""


def cut(jobs: Iterable[FileJob], left: int, pullers: int) -> Iterator[PlanPart]:
    """Cut jobs, with `left` bytes to write, into parts. Takes the jobs' waiting batches; a batch is never cut.

    The parts shrink, so that at the end nobody waits long for the last one.
    """
    part = PlanPart()
    for job in jobs:
        waiting, job.waiting = job.waiting[::-1], []
        for batch in waiting:
            begun = job.written.begun.get(batch.number)
            nbytes = batch.end - (begun.end if begun else batch.begin)
            most = min(MAX_PART_BYTES, max(MIN_PART_BYTES, left // (ROUND_DIVISOR * pullers)))
            if part.batches and part.nbytes + nbytes > most:
                yield part
                left -= part.nbytes
                part = PlanPart()
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
    part: PlanPart,
    is_stopped: Callable[[], bool],
    *,
    share: ThreadShare,
    checksum: bool,
) -> PartOutcome:
    """Write the batches of a part to `folder`, which has the parents of its files, and wait for the disk.

    `share` is the thread's own. Raises PartStoppedError if `is_stopped` returns true, and what `execute` raises.
    """

    def on_bytes(count: int) -> None:
        if is_stopped():
            raise PartStoppedError

    on_bytes(0)
    ledger = Ledger(every=True, boundary=CELL_BYTES, most=share.ranges) if checksum else None
    state = RunState(plan, folder, share, ledger, Journal(), on_bytes)
    outcome = PartOutcome(names=state.names)

    def begin(file: OutputFile) -> FileJob:
        before = WrittenFile(begun=part.begun.get(file.path, {}))
        return FileJob(state, file, before, set(part.batches[file.path]))

    def close(job: FileJob) -> None:
        """Flush a file to disk; other workers write to it too, and the main process completes it."""
        job.sink.flush()
        job.abandon()
        with state.lock:
            outcome.files[job.path] = job.written, job.digest.seen()
            outcome.read.storages |= job.unsaved.storages

    queue = Queue(state, (file for file in plan.files if file.path in part.batches), begin, close)
    with queue:
        queue.work(Event())
    outcome.read.ranges = ledger.passed if ledger else {}
    outcome.runs = {path: ByteRanges(ranges.as_list()) for path, ranges in outcome.read.ranges.items()}
    return outcome
