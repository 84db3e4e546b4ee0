"""Execute a plan on many machines: hand out parts to workers, and merge their results here.

The process that starts the run keeps the journal and completes the files. Last, it writes the files without tensors
(indexes, trackers, configs) itself.
"""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from reshard.base.errors import ReshardError, type_and_message
from reshard.cluster.plan_parts import PartOutcome, PlanPart, cut
from reshard.cluster.slurm_executor import Slurm
from reshard.transfer import part_claims
from reshard.transfer.execute import OnFile, Queue, divided
from reshard.transfer.file_job import FileJob, continued
from reshard.transfer.journal import Journal
from reshard.transfer.memory_budget import ThreadShare
from reshard.transfer.plan import OutputFile, Plan
from reshard.transfer.run_state import RunState, RunTotals, SourceReads, opened
from reshard.transfer.threads import together

MAX_TRIES = 3
"""Most attempts at a part whose worker is lost."""

PARTS_PER_WORKER = 4
"""Parts per worker: enough that all workers finish at about the same time."""

MIN_PART_BYTES = 64 << 20
"""Least bytes of a part, so that writing it takes longer than handing it out."""


@dataclass(frozen=True)
class PartOrder:
    """A part, with what a worker needs to write it. `claim` and `token` are those of the part."""

    folder: Path
    claim: Path
    token: str
    part: PlanPart


Perform = Callable[[PartOrder], PartOutcome]
"""Executes a part, in any process; picklable."""


def spread(
    plan: Plan,
    folder: Path,
    executor: Slurm,
    perform: Perform,
    *,
    share: ThreadShare,
    checksum: bool = True,
    on_bytes: Callable[[int], None] = lambda count: None,
    on_file: OnFile = lambda name, stopped: None,
    on_lost: Callable[[int], None] = lambda nbytes: None,
    journal: Journal | None = None,
) -> RunTotals:
    """Write all files of `plan` to `folder`, which all workers see, as `execute` does on one machine.

    Raises what `execute` raises, on any machine, and ReshardError if workers are lost repeatedly.
    """
    state = opened(
        plan, folder, share, journal or Journal(), checksum=checksum, on_bytes=on_bytes, on_lost=on_lost
    )
    whole, left = divided(state)
    local = [file for file in left if next(iter(file.blocks), None) is None]
    names = {file.path for file in local}
    remote = [file for file in left if file.path not in names]
    _Distribution(state, executor, perform, on_file).write(remote, whole)
    with Queue(state, local, lambda file: continued(state, file), FileJob.close, on_file) as queue:
        together(lambda index, stopped: queue.work(stopped), share.threads)
    return state.settle()


def parts_for(workers: int, jobs: Iterable[FileJob], left: int) -> list[PlanPart]:
    """Cut `jobs`, with `left` bytes to write, into parts, in the order in which they are handed out."""
    most = max(MIN_PART_BYTES, left // (PARTS_PER_WORKER * workers))
    return sorted(cut(jobs, most), key=lambda part: part.nbytes <= 2 * most)  # much longer parts begin first


class _Distribution:
    """Files whose parts are written by workers, and put together here."""

    def __init__(self, state: RunState, executor: Slurm, perform: Perform, on_file: OnFile) -> None:
        self._state, self._executor, self._perform, self._on_file = state, executor, perform, on_file
        self._claims = state.folder.with_name(part_claims.CLAIMS_FOLDER)
        self._token = secrets.token_hex(8)
        self._tries: Counter[int] = Counter()
        self._jobs: dict[str, FileJob] = {}

    def write(self, files: Sequence[OutputFile], whole: Iterable[str]) -> None:
        """Have workers write the rest of `files`; those that are `whole` already are only passed on."""
        jobs = [continued(self._state, file) for file in files]
        written = [job for job in jobs if not job.waiting]
        self._jobs = {job.path: job for job in jobs if job.waiting}
        left = sum(file.size - job.written.nbytes for file, job in zip(files, jobs, strict=True))
        parts = parts_for(self._executor.slots, jobs, left)
        stopped = Event()

        def close(job: FileJob) -> None:
            if not stopped.is_set():
                job.close()
                self._on_file(job.path, stopped)

        with ThreadPoolExecutor(self._state.share.threads, "close") as closers:
            try:
                closing = {closers.submit(close, job) for job in written}
                closing |= {closers.submit(self._on_file, path, stopped) for path in whole}
                self._follow(deque(parts), closing, lambda job: closers.submit(close, job))
            finally:
                stopped.set()
                part_claims.stop(self._claims)

    def _follow(
        self, waiting: deque[PlanPart], closing: set[Future[None]], close: Callable[[FileJob], Future[None]]
    ) -> None:
        """Keep the workers busy until no part is left, and close each file once all of it is written."""
        running: dict[Future[PartOutcome], PlanPart] = {}
        while waiting or running or closing:
            count = min(self._executor.queue - len(running), len(waiting))
            if count > 0:
                taken = [waiting.popleft() for _ in range(count)]
                orders = [self._order(part) for part in taken]
                futures = self._executor.submit(self._perform, orders, self._claims)
                running.update(zip(futures, taken, strict=True))
            pending: list[Future[Any]] = [*running, *closing]
            done, _ = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
            for future in done & closing:
                closing.remove(future)
                future.result()
            for future in done & running.keys():
                part = running.pop(future)
                outcome = self._outcome(part, future)
                if outcome is None:
                    waiting.appendleft(part)
                else:
                    closing.update(map(close, self._merge(part, outcome)))

    def _order(self, part: PlanPart) -> PartOrder:
        claim = self._claims / f"{part.number}.claim"
        part_claims.stake(claim, self._token)
        return PartOrder(self._state.folder, claim, self._token, part)

    def _outcome(self, part: PlanPart, future: Future[PartOutcome]) -> PartOutcome | None:
        """The outcome of a part; None if its worker was lost and the part must be repeated."""
        self._tries[part.number] += 1
        try:
            outcome = future.result()
        except Exception as error:
            if self._tries[part.number] < MAX_TRIES:
                return None
            raise ReshardError(
                "workers-lost",
                "workers died while they were writing a part of the output",
                found=f"{part}: {self._tries[part.number]} times, at last {type_and_message(error)}",
                remedy="see in the log of the workers why they ended (out of memory, preempted), then run the same "
                "command again: it continues",
            ) from _passing_error(error)
        if outcome.error:
            raise outcome.error
        return outcome

    def _merge(self, part: PlanPart, outcome: PartOutcome) -> list[FileJob]:
        """Merge and record the findings of a part; return the files with nothing left to write."""
        state = self._state
        state.name(outcome.names)
        read = outcome.read
        state.touch(read.storages)
        read.ranges = state.ledger.merge(read.ranges) if state.ledger else {}
        whole = []
        for path, (written, seen) in outcome.files.items():
            job = self._jobs[path]
            job.digest.merge(seen)
            job.finish(written, read)
            read = SourceReads()  # it does not matter with which file it is recorded
            job.record()
            if job.is_written():
                whole.append(self._jobs.pop(path))
        (self._claims / f"{part.number}.claim").unlink(missing_ok=True)
        state.advance(part.nbytes)
        return whole


def _passing_error(error: Exception) -> OSError:
    """The error of a lost worker as one that may not occur again, so that what is written is kept."""
    if isinstance(error, OSError):
        return error
    passing = ConnectionError(f"{type(error).__name__}: {error}")
    passing.__cause__ = error
    return passing
