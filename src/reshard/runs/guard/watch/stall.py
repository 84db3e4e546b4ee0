"""A run that stands still: no progress, and nothing that explains it.

No counter has advanced for a minute, or thirty times the usual step. Then the processes are looked at. The run stands
still if a rank is stopped; if every process is idle for another minute; or if, twice in half a minute, some ranks wait
in a collective for ranks that are idle elsewhere or gone. A process that computes, reads or writes, or waits for a
server, explains the silence until `--stall` (before the first step `--startup`) has passed without a line of output or
bytes of files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby

from reshard.base.errors import Problem
from reshard.runs.guard.options import GuardOptions
from reshard.runs.guard.watch.flight_recorder import ask_for_dumps, described, read_dumps
from reshard.runs.guard.watch.process_tree import Process, Processes, below, ranks_of
from reshard.runs.guard.watch.stacks import LOADER, SERVICE, Stack, py_spy
from reshard.runs.guard.watch.trainer_progress import TrainerProgress
from reshard.runs.guard.watch.watcher import Notice, Watcher

_BUSY = 0.05
"""Share of a processor above which a process is not idle: watchdogs, loggers and launchers that poll stay below."""
_MOVING = 16_384
"""Bytes in a second above which a process is not idle."""
_AT_ONCE = 8
"""Stacks that are read at the same time."""
_LONGER = 3
"""A silence this many times as long as any before is never explained by itself."""


@dataclass(frozen=True)
class StallLimits:
    """After how many seconds a run is looked at, and what is concluded."""

    startup: float = GuardOptions.startup
    stall: float = GuardOptions.stall
    look: float = 60
    """Shortest silence before processes are looked at; and, if everything is idle, how much longer it has to last."""
    steps: float = 30
    """The same in steps."""
    again: float = 30
    """Time between two looks."""
    window: float = 10
    """Time over which activity is measured, and for which a rank must be stopped."""


@dataclass
class Activity:
    """Since when each process is idle, and when files were last read or written."""

    window: float
    moved: float = 0.0
    _since: dict[int, float] = field(default_factory=dict)
    _before: Processes = field(default_factory=dict)
    _at: float = 0.0

    def update(self, now: float, processes: Processes) -> None:
        """Compare the processes with those of a window ago."""
        passed = now - self._at
        if passed < self.window:
            return
        for pid, each in processes.items():
            before = self._before.get(pid)
            used = each.seconds - (before.seconds if before else 0)
            read = each.io - (before.io if before else 0)
            if before is None or each.state == "R" or used > _BUSY * passed or read > _MOVING * passed:
                self._since[pid] = now
            if before is not None and read > _MOVING * passed:
                self.moved = now
        self._since = {pid: since for pid, since in self._since.items() if pid in processes}
        self._before, self._at = processes, now

    def idle(self, now: float, processes: Iterable[Process]) -> float:
        """For how long all of the processes have been idle."""
        return now - max((self._since.get(each.pid, now) for each in processes), default=now)


@dataclass(frozen=True)
class StandingRanks:
    """What the ranks do: some wait for others, some are idle elsewhere, some are gone, and the rest is busy."""

    stacks: dict[int, Stack]
    waiting: set[int]
    idle: set[int]
    gone: set[int]
    asking: set[int]
    """Those that wait for a service, such as a server that generates: they count as busy."""

    @property
    def busy(self) -> set[int]:
        """The ranks that compute, read or write."""
        return self.stacks.keys() - self.waiting - self.idle - self.gone

    @property
    def blamed(self) -> set[int]:
        """The ranks that the others wait for, if that is certain."""
        known = all(self.stacks[rank].frames for rank in self.idle)
        return self.idle | self.gone if self.waiting and known and not self.busy else set()

    @property
    def by_hand(self) -> bool:
        """Whether a rank waits for a person."""
        return any(stack.by_hand for stack in self.stacks.values())


@dataclass
class StallWatcher(Watcher):
    """A Watcher that reports a run that stands still, once each time."""

    progress: TrainerProgress
    read_stack: Callable[[Process], Stack]
    limits: StallLimits = field(default_factory=StallLimits)
    stop: bool = False
    """Whether a stall ends the run."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables of the command, which tell where torch's flight recorder writes."""
    _start: float = 0.0
    _pids: dict[int, int] = field(default_factory=dict)
    """The process of each rank that was seen."""
    _stopped: dict[int, float] = field(default_factory=dict)
    """Since when a rank is stopped."""
    _look: StandingRanks | None = None
    _looked: float = 0.0
    _reported: float | None = None
    """The last sign of life before the report."""

    def __post_init__(self) -> None:
        self._activity = Activity(self.limits.window)

    def tick(self, now: float, processes: Processes) -> Iterator[Notice]:
        """Judge the silence of the run."""
        self._start = self._start or now
        self._activity.update(now, processes)
        ranks = ranks_of(processes)
        self._pids.update((rank, each.pid) for rank, each in ranks.items() if each.rank is not None)
        self._stopped = {
            rank: self._stopped.get(rank, now) for rank, each in ranks.items() if each.state == "T"
        }
        alive = max(self._start, self.progress.alive, 0 if self.progress.started else self.progress.spoke)
        if self._reported is not None and alive > self._reported and not self._stopped:
            yield _goes_on(now - self._reported)
            self._reported = None
        if self._reported is None and ranks:
            notice = self._judge(now, now - alive, ranks, processes)
            if notice:
                self._reported = alive
                yield notice

    def _judge(self, now: float, silent: float, ranks: Processes, processes: Processes) -> Notice | None:
        stopped = [rank for rank, since in self._stopped.items() if now - since >= self.limits.window]
        if stopped:
            return self._report_stopped({rank: ranks[rank] for rank in stopped})
        soonest = max(self.limits.look, self.limits.steps * self.progress.interval)
        if silent < min(soonest, self._last_limit):
            self._look = None
            return None
        if now - self._looked < self.limits.again:
            return None
        before, self._looked = self._look, now
        self._look = self._see(now, silent, ranks, processes)
        if self._look.by_hand or not self._stands_still(now, silent, before, processes):
            return None
        return self._report(silent, self._look, ranks, processes)

    @property
    def _last_limit(self) -> float:
        """The silence that is reported whatever the processes do."""
        limits = self.limits
        return max(limits.stall, _LONGER * self.progress.longest) if self.progress.started else limits.startup

    def _see(self, now: float, silent: float, ranks: Processes, processes: Processes) -> StandingRanks:
        """Read the stacks; if all ranks are busy, only at the end: reading takes a little time from them."""
        idle = {
            rank
            for rank, each in ranks.items()
            if self._activity.idle(now, below(each.pid, processes)) >= self.limits.again
        }
        ask_for_dumps(self.environment, ranks)
        is_read = idle or silent >= self._last_limit
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            read = pool.map(self.read_stack if is_read else lambda _: Stack(), ranks.values())
            stacks = dict(zip(ranks, read, strict=True))
        waiting = {rank for rank, stack in stacks.items() if stack.waits_in(rank in idle)}
        gone = {
            rank for rank, pid in self._pids.items() if pid not in processes or processes[pid].state == "Z"
        }
        asking = {rank for rank, stack in stacks.items() if stack.asks(SERVICE)}
        return StandingRanks(stacks, waiting - gone, idle - waiting - asking - gone, gone, asking)

    def _stands_still(
        self, now: float, silent: float, before: StandingRanks | None, processes: Processes
    ) -> bool:
        look = self._look
        assert look is not None
        if self._outlasts(now, silent) or (look.blamed and (look.gone or look == before)):
            return True
        idle = self._activity.idle(now, processes.values())
        settled = min(silent - self.limits.look, idle) >= self.limits.look
        ends = bool(look.gone) and look.gone == self._pids.keys()  # the launcher is the last to end
        return settled and not ends and not look.asking and self._is_known(look, processes)

    def _outlasts(self, now: float, silent: float) -> bool:
        """Whether the silence is too long whatever the processes do: without a line of output, or bytes of files."""
        return min(silent, now - max(self._activity.moved, self.progress.spoke)) >= self._last_limit

    def _is_known(self, look: StandingRanks, processes: Processes) -> bool:
        """Whether the cause is among these ranks.

        It is not if a single process waits, perhaps for something slow, or another machine prepares data for all.
        """
        worlds = [each.world for each in processes.values() if each.rank is not None]
        world = max(worlds, default=0)
        if world > len(worlds):
            return self.progress.started and bool(look.idle)
        return world > 1 or len(look.stacks) > 1 or bool(look.gone)

    def _report(self, silent: float, look: StandingRanks, ranks: Processes, processes: Processes) -> Notice:
        state = f"no progress for {silent:.0f} s, since {self.progress.at}"
        if look.blamed:
            state += f"; {_ranks(look.waiting)} {_s('wait', look.waiting)} for {_ranks(look.blamed)}"
        elif look.waiting and not look.busy and not look.idle:
            state += "; all ranks wait for others"
        return Notice(
            Problem(
                "run-stands-still",
                "the run has stalled",
                found=state,
                remedy="look at what each rank does, end the run, fix the cause, and resume from the last checkpoint",
                severity="warning",
            ),
            lines=(
                *_described(look, ranks),
                *self._loaders(look, ranks, processes),
                *described(read_dumps(self.environment, self._start)),
            ),
            stop=self.stop,
        )

    def _loaders(self, look: StandingRanks, ranks: Processes, processes: Processes) -> Iterator[str]:
        """What a worker does for each rank that waits for its data loader."""
        for rank in sorted(look.idle):
            workers = [each for each in below(ranks[rank].pid, processes) if each.pid != ranks[rank].pid]
            if workers and look.stacks[rank].asks(LOADER):
                stack = self.read_stack(workers[0])
                yield f"its data loader: {stack.place} (by {stack.source}), process {workers[0].pid}"

    def _report_stopped(self, stopped: Processes) -> Notice:
        pids = " ".join(str(each.pid) for each in stopped.values())
        return Notice(
            Problem(
                "rank-stopped",
                "a rank is stopped by a signal",
                found=f"{_ranks(stopped)} (process {pids}), at {self.progress.at}",
                remedy=f"continue it: kill -CONT {pids}",
                severity="warning",
                values={"pids": pids},
            ),
            stop=self.stop,
        )


def _described(look: StandingRanks, ranks: Processes) -> Iterator[str]:
    """A line for each group of ranks that do the same."""
    groups: dict[str, list[int]] = {}
    for rank in sorted({*look.stacks, *look.gone}):
        groups.setdefault(_doing(look, rank), []).append(rank)
    for text, group in groups.items():
        pids = ", ".join(str(ranks[rank].pid) for rank in group if rank in ranks)
        yield f"{_ranks(group)}: {text}" + (f", process {pids}" if pids else "")
    if py_spy() is None and not any(stack.frames for stack in look.stacks.values()):
        yield "to see the line of code where each rank is, install py-spy: python -m pip install py-spy"


def _doing(look: StandingRanks, rank: int) -> str:
    if rank in look.gone:
        return "ended"
    stack = look.stacks[rank]
    source = f"{stack.place} (by {stack.source})"
    if rank in look.waiting:
        return f"waits in {stack.waits_in(True)}, called {source}"
    state = "idle" if rank in look.idle else "busy"
    return f"{state} in {stack.inside}, called {source}" if stack.inside else f"{state} {source}"


def _ranks(ranks: Iterable[int]) -> str:
    """Ranks as text: "rank 3", "ranks 0-2, 5"."""
    numbers = sorted(ranks)
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    spans = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(spans)}"


def _s(verb: str, ranks: Iterable[int]) -> str:
    return verb if len(list(ranks)) > 1 else f"{verb}s"


def _goes_on(seconds: float) -> Notice:
    return Notice(
        Problem(
            "run-goes-on",
            "the run goes on",
            found=f"after {seconds:.0f} s without progress",
            severity="warning",
        )
    )
