"""Execute a plan on many machines: workers take parts of it, and this process merges what they report.

The process that starts the run keeps the journal and completes the files. Last, it writes the files without tensors
(indexes, trackers, configs) itself.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
"""Most attempts at a part whose worker is lost, and at starting a worker."""

PARTS = "parts.pickle"
"""The list of parts, in the folder of claims."""

ENDING_SECONDS = 5.0
"""Seconds for workers to end once nothing is left to do, before they are cancelled."""


@dataclass(frozen=True)
class WorkerOrder:
    """What worker `number` of `count` needs: the folder of the output, and that of the claims, with `PARTS`."""

    folder: Path
    claims: Path
    number: int
    count: int


Perform = Callable[[WorkerOrder], "Exception | None"]
"""Takes parts until none is left, in any process, and returns the error that it failed with; picklable."""


def spread(
    plan: Plan,
    folder: Path,
    executor: Slurm,
    perform: Perform,
    *,
    pullers: int,
    share: ThreadShare,
    checksum: bool = True,
    on_bytes: Callable[[int], None] = lambda count: None,
    on_file: OnFile = lambda name, stopped: None,
    on_lost: Callable[[int], None] = lambda nbytes: None,
    journal: Journal | None = None,
) -> RunTotals:
    """Write all files of `plan` to `folder`, which all workers see, as `execute` does on one machine.

    `pullers` is the number of threads of each worker. Raises what `execute` raises, on any machine, and ReshardError if
    workers are lost repeatedly.
    """
    state = opened(
        plan, folder, share, journal or Journal(), checksum=checksum, on_bytes=on_bytes, on_lost=on_lost
    )
    whole, left = divided(state)
    local = [file for file in left if next(iter(file.blocks), None) is None]
    names = {file.path for file in local}
    remote = [file for file in left if file.path not in names]
    _Distribution(state, executor, perform, on_file).write(remote, whole, pullers)
    with Queue(state, local, lambda file: continued(state, file), FileJob.close, on_file) as queue:
        together(lambda index, stopped: queue.work(stopped), share.threads)
    return state.settle()


def parts_for(pullers: int, jobs: Iterable[FileJob], left: int) -> list[PlanPart]:
    """Cut `jobs`, with `left` bytes to write, into parts for `pullers` threads; the largest are taken first."""
    return sorted(cut(jobs, left, pullers), key=lambda part: -part.nbytes)


class _Distribution:
    """Files whose parts are written by workers, and put together here."""

    def __init__(self, state: RunState, executor: Slurm, perform: Perform, on_file: OnFile) -> None:
        self._state, self._executor, self._perform, self._on_file = state, executor, perform, on_file
        self._claims = state.folder.with_name(part_claims.CLAIMS_FOLDER) / secrets.token_hex(8)
        self._tries: Counter[int] = Counter()
        self._jobs: dict[str, FileJob] = {}
        self._parts: list[PlanPart] = []
        self._running: dict[Future[Exception | None], WorkerOrder] = {}

    def write(self, files: Sequence[OutputFile], whole: Iterable[str], pullers: int) -> None:
        """Have workers write the rest of `files`; those that are `whole` already are only passed on."""
        jobs = [continued(self._state, file) for file in files]
        written = [job for job in jobs if not job.waiting]
        self._jobs = {job.path: job for job in jobs if job.waiting}
        left = sum(file.size - job.written.nbytes for file, job in zip(files, jobs, strict=True))
        self._parts = parts_for(self._executor.slots * pullers, jobs, left)
        stopped = Event()

        def close(job: FileJob) -> None:
            if not stopped.is_set():
                job.close()
                self._on_file(job.path, stopped)

        with ThreadPoolExecutor(self._state.share.threads, "close") as closers:
            try:
                closing = {closers.submit(close, job) for job in written}
                closing |= {closers.submit(self._on_file, path, stopped) for path in whole}
                self._follow(closing, lambda job: closers.submit(close, job))
            finally:
                stopped.set()
                part_claims.stop(self._claims)

    def _start(self) -> list[WorkerOrder]:
        """Start as many workers as can get a part."""
        count = min(self._executor.slots, len(self._parts))
        orders = [WorkerOrder(self._state.folder, self._claims, number, count) for number in range(count)]
        self._claims.mkdir(parents=True)
        part_claims.save(self._claims / PARTS, self._parts)
        self._submit(orders)
        return orders

    def _submit(self, orders: Sequence[WorkerOrder]) -> None:
        futures = self._executor.submit(self._perform, orders, self._claims)
        self._running.update(zip(futures, orders, strict=True))

    def _follow(self, closing: set[Future[None]], close: Callable[[FileJob], Future[None]]) -> None:
        """Merge parts until all are written, replace lost workers, and close each file once it is complete."""
        orders, waiting = self._start(), set(range(len(self._parts)))
        while waiting or closing:
            pending: list[Future[Any]] = [*self._running, *closing]
            done, _ = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
            for future in done & closing:
                closing.remove(future)
                future.result()
            outcomes = dict(part_claims.finished(self._claims, waiting))
            closing.update(map(close, self._merge(outcomes)))
            waiting -= outcomes.keys()
            lost: dict[WorkerOrder, Exception] = {}
            for future in done & self._running.keys():
                order = self._running.pop(future)
                if isinstance(reason := future.exception(), Exception):
                    lost[order] = reason
                elif error := future.result():
                    raise error
            if waiting and not self._running and not lost:
                lost = dict.fromkeys(orders, RuntimeError("no worker is left"))
            if lost and waiting:
                self._replace(lost)
        wait(self._running, timeout=ENDING_SECONDS)

    def _replace(self, lost: Mapping[WorkerOrder, Exception]) -> None:
        """Replace workers that ended with an error. Raises ReshardError if that was tried too often."""
        for order, error in lost.items():
            # Those that have no part are counted as well.
            numbers = part_claims.unfinished_parts(self._claims, order.number) or [-1 - order.number]
            self._tries.update(numbers)
            worst = max(numbers, key=self._tries.__getitem__)
            if self._tries[worst] >= MAX_TRIES:
                part = self._parts[worst] if worst >= 0 else f"worker {order.number}, before its first part"
                raise ReshardError(
                    "workers-lost",
                    "workers died while they were writing a part of the output",
                    found=f"{part}: {self._tries[worst]} times, at last {type_and_message(error)}",
                    remedy="see in the log of the workers why they ended (out of memory, preempted), then run the same "
                    "command again: it continues",
                ) from _passing_error(error)
            part_claims.release(self._claims, order.number)
        self._submit(list(lost))

    def _merge(self, outcomes: Mapping[int, PartOutcome]) -> list[FileJob]:
        """Merge and record the findings of some parts; return the files with nothing left to write."""
        state = self._state
        changed: dict[FileJob, bool] = {}
        for outcome in outcomes.values():
            state.name(outcome.names)
            read = outcome.read
            state.touch(read.storages)
            read.ranges = state.ledger.merge(read.ranges, outcome.runs) if state.ledger else {}
            for path, (written, seen) in outcome.files.items():
                job = self._jobs[path]
                job.digest.merge(seen)
                job.finish(written, read)
                read = SourceReads()  # it does not matter with which file it is recorded
                changed[job] = job.is_written()
        for job in changed:
            job.record()
        for number in outcomes:
            state.advance(self._parts[number].nbytes)
        return [self._jobs.pop(job.path) for job, is_whole in changed.items() if is_whole]


def _passing_error(error: Exception) -> OSError:
    """The error of a lost worker as one that may not occur again, so that what is written is kept."""
    if isinstance(error, OSError):
        return error
    passing = ConnectionError(f"{type(error).__name__}: {error}")
    passing.__cause__ = error
    return passing
