"""Execute a plan on many machines: hand out parts to workers, and merge their results here.

The process that starts the run keeps the journal and completes the files. Last, it writes the files without tensors
(indexes, trackers, configs) itself.
"""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from reshard.errors import ReshardError, said
from reshard.transfer import claims
from reshard.transfer.execute import OnFile, Report, Run, make_folders
from reshard.transfer.executors import Executor
from reshard.transfer.files import Files
from reshard.transfer.job import Job
from reshard.transfer.journal import Journal, Written
from reshard.transfer.kept import check_kept
from reshard.transfer.ledger import Ledger, Passed
from reshard.transfer.memory import Share
from reshard.transfer.parts import Outcome, Part, cut
from reshard.transfer.plan import OutputFile, Plan
from reshard.transfer.threads import together

TRIES = 3
"""Most attempts at a part whose worker is lost."""

SHARES = 4
"""Parts per worker: enough that all workers finish at about the same time."""

LEAST = 64 << 20
"""Least bytes of a part, so that writing it takes longer than handing it out."""


@dataclass(frozen=True)
class Order:
    """A part, with what a worker needs to write it. `claim` and `token` are those of the part."""

    folder: Path
    claim: Path
    token: str
    part: Part


Perform = Callable[[Order], Outcome]
"""Executes a part, in any process; picklable."""


def spread(
    plan: Plan,
    folder: Path,
    executor: Executor,
    perform: Perform,
    *,
    share: Share,
    checksum: bool = True,
    on_bytes: Callable[[int], None] = lambda count: None,
    on_file: OnFile = lambda name, stopped: None,
    on_lost: Callable[[int], None] = lambda nbytes: None,
    journal: Journal | None = None,
) -> Report:
    """Write all files of `plan` to `folder`, which all workers see, as `execute` does on one machine.

    Raises what `execute` raises, on any machine, and ReshardError if workers are lost repeatedly.
    """
    make_folders(plan, folder)
    journal = journal or Journal()
    kept = check_kept(plan, folder, journal, share.threads)
    if kept.lost:
        on_lost(kept.lost)
    ledger = Ledger(every=True, passed=journal.progress.passed, most=share.ranges) if checksum else None
    plan.sources.ledger = ledger
    run = _Spread(plan, folder, share, ledger, on_bytes, journal, on_file, kept)
    try:
        run.hand_out(executor, perform)
        together(run.work, share.threads)
    finally:
        run.leave()
    run.settle(plan.sources.sizes())
    return run.report


def parts_for(executor: Executor, jobs: Iterable[Job], left: int) -> list[Part]:
    """Cut `jobs`, with `left` bytes to write, into parts, in the order in which they are handed out."""
    most = max(LEAST, left // (SHARES * max(1, executor.slots)))
    parts = cut(jobs, min(most, executor.most))
    return sorted(parts, key=lambda part: part.nbytes <= 2 * most)  # much longer parts begin first


class _Spread(Run):
    """The state of a run whose parts are written by workers."""

    def hand_out(self, executor: Executor, perform: Perform) -> None:
        """Have workers write all files with tensors; the others are left to be written here."""
        self._claims = self.folder.with_name(claims.FOLDER)
        self._token = secrets.token_hex(8)
        self._tries: Counter[int] = Counter()
        self._jobs: dict[str, Job] = {}
        here = deque(file for file in self.waiting if next(iter(file.blocks), None) is None)
        names = {file.path for file in here}
        there = [file for file in self.waiting if file.path not in names]
        self.waiting = here
        before = self.journal.progress.files
        total = sum(file.size - before.get(file.path, Written()).nbytes for file in there)
        jobs = list(map(self._begun, there))
        written = [self._jobs.pop(job.path) for job in jobs if not job.waiting]
        parts = parts_for(executor, jobs, total)
        stopped = Event()
        with ThreadPoolExecutor(self.share.threads, "close") as closers:
            try:
                closing = {closers.submit(self.end, job, stopped) for job in written}
                closing |= {closers.submit(self.on_file, path, stopped) for path in self.adopted}
                self.adopted.clear()
                self._follow(
                    executor,
                    perform,
                    deque(parts),
                    closing,
                    lambda job: closers.submit(self.end, job, stopped),
                )
            finally:
                stopped.set()
                claims.stop(self._claims)

    def _begun(self, file: OutputFile) -> Job:
        """The remaining work on a file, whose results are merged here."""
        self._jobs[file.path] = self.begin(file)
        return self._jobs[file.path]

    def _follow(
        self,
        executor: Executor,
        perform: Perform,
        waiting: deque[Part],
        closing: set[Future[None]],
        close: Callable[[Job], Future[None]],
    ) -> None:
        """Keep the workers busy until no part is left, and close each file once all of it is written."""
        running: dict[Future[Outcome], Part] = {}
        while waiting or running or closing:
            count = min(executor.queue - len(running), len(waiting))
            if count > 0:
                taken = [waiting.popleft() for _ in range(count)]
                orders = [self._order(part) for part in taken]
                running.update(zip(executor.submit(perform, orders, self._claims), taken, strict=True))
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

    def _order(self, part: Part) -> Order:
        claim = self._claims / f"{part.number}.claim"
        claims.stake(claim, self._token)
        return Order(self.folder, claim, self._token, part)

    def _outcome(self, part: Part, future: Future[Outcome]) -> Outcome | None:
        """The outcome of a part; None if its worker was lost and the part must be repeated."""
        self._tries[part.number] += 1
        try:
            outcome = future.result()
        except (Exception, CancelledError) as error:
            if self._tries[part.number] < TRIES and not isinstance(error, ImportError):
                return None
            raise _lost(part, self._tries[part.number], error) from _passing(error)
        if outcome.error:
            raise outcome.error
        return outcome

    def _merge(self, part: Part, outcome: Outcome) -> list[Job]:
        """Merge and record the findings of a part; return the files with nothing left to write."""
        with self.lock:
            self.names.update({each: name for each, name in outcome.names.items() if each not in self.names})
        passed = self._passed(outcome)
        whole = []
        for path, (found, seen) in outcome.files.items():
            found.passed, passed = passed, {}  # it does not matter with which file they are recorded
            self.touch(found.taken)
            job = self._jobs[path]
            job.digest.merge(seen)
            job.finish(found)
            self.report.nonfinite += sorted(found.nonfinite - set(self.report.nonfinite))
            job.note()
            if job.is_written():
                whole.append(self._jobs.pop(path))
        (self._claims / f"{part.number}.claim").unlink(missing_ok=True)
        self.advance(part.nbytes)
        return whole

    def _passed(self, outcome: Outcome) -> Passed:
        """The ranges of the sources that this part was the first to read."""
        if self.ledger is None:
            return {}
        files = Files()
        try:
            return self.ledger.merge(files, outcome.passed)
        finally:
            files.close()


def _passing(error: BaseException) -> OSError:
    """The error of a lost worker as one that may not occur again, so that what is written is kept."""
    if isinstance(error, OSError):
        return error
    passing = ConnectionError(f"{type(error).__name__}: {error}")
    passing.__cause__ = error
    return passing


def _lost(part: Part, tries: int, error: BaseException) -> ReshardError:
    if isinstance(error, ImportError):
        return ReshardError(
            "worker-cannot-load-reshard",
            "a worker cannot load reshard",
            found=str(error),
            remedy="install the same version of reshard, with what it needs, on all nodes",
        )
    return ReshardError(
        "workers-lost",
        "workers died while they were writing a part of the output",
        found=f"{part}: {tries} times, at last {said(error) if isinstance(error, Exception) else 'cancelled'}",
        remedy="see in the log of the workers why they ended (out of memory, preempted), then run the same command "
        "again: it continues",
    )
