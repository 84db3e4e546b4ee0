"""Start the ranks of a run and wait until the last has ended; or run a rank that another launcher has started.

torchrun starts the ranks in a separate session. Their output goes to `train.log`; the console shows one line of
progress, read from `metrics.jsonl`. Whatever ends this process ends the ranks; signals that can be caught let them
finish and save their step.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError, RunFailedError
from reshard.base.foreign_text import escape
from reshard.base.plain_json import put
from reshard.base.start_environment import start_environment
from reshard.guard.end.completeness import RUN_RECORD
from reshard.guard.screen import print_notice
from reshard.guard.supervise import node_meeting
from reshard.guard.supervise.child_processes import children
from reshard.guard.supervise.output_relay import OutputRelay
from reshard.guard.supervise.supervision import supervise
from reshard.guard.watch.memory_watch import MemoryWatcher
from reshard.guard.watch.process_tree import Processes
from reshard.guard.watch.stacks import read_stack
from reshard.guard.watch.stall import StallLimits, StallWatcher
from reshard.guard.watch.trainer_progress import TrainerProgress
from reshard.guard.watch.watcher import Notice, OutputLine, Watcher
from reshard.training import signals
from reshard.training.launching.end_of_run import RunScreen, end, failure_of_rank, failure_of_ranks, print_end
from reshard.training.launching.rank_environment import LaunchedRank, forget, launched_rank
from reshard.training.launching.run_record import record_of
from reshard.training.launching.torchrun import TORCHRUN_MODULE, Torchrun
from reshard.training.planning.gpu_models import gpu_count
from reshard.training.run import Run
from reshard.training.show import trackers
from reshard.training.show.metrics import METRICS_FILE, MetricsRow, MetricsTail, begun, monitor_of
from reshard.training.show.progress_display import ProgressDisplay
from reshard.training.worker import PROBLEMS_FILE, REFUSED_STATUS, TRAINED_FILE, claim, claimed, work

LOG_FILE = "train.log"
WORKER_MODULE = "reshard.training.worker"
"""The module that each rank runs."""
FAILED_STATUS = 1
POLL_SECONDS = 0.2
"""Seconds between two looks at the ranks."""
EVALUATION_LIMITS = StallLimits(stall=1800)
"""An evaluation, which reports nothing until it ends, may take longer than the output of a script stays silent."""
TORCHRUN_END_SECONDS = 40.0
"""Seconds that torchrun gets to end its ranks; it gives them 30 itself."""


def processes(run: Run) -> int:
    """The number of ranks that reshard starts on each node: the requested one, or one per visible GPU, or one."""
    return run.ranks.nproc or gpu_count() or 1


def leads(run: Run) -> bool:
    """Whether this process acts for the run: it is rank 0, or the launcher on the first node."""
    place = launched_rank(run)
    return place.rank == 0 if place else run.ranks.node_rank == 0


def command(run: Run) -> list[str]:
    """The command that starts the ranks of this node. Raises ReshardError if nodes could not find each other."""
    ranks, record = run.ranks, str(run.output / of_node(run, RUN_RECORD))
    if _is_alone(run):
        return [sys.executable, "-m", WORKER_MODULE, record]
    words = [sys.executable, "-m", TORCHRUN_MODULE, f"--nproc-per-node={processes(run)}"]
    if ranks.nnodes == 1:  # by address, because a host's own name may not resolve; port 0 selects a free port
        words += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    else:
        host, port = _rendezvous(run)
        words += [f"--nnodes={ranks.nnodes}", f"--node-rank={ranks.node_rank}"]
        words += [f"--master-addr={host}", f"--master-port={port}"]
    words += [f"--max-restarts={ranks.max_restarts}"] if ranks.max_restarts else []
    return [*words, "--tee=3", "-m", WORKER_MODULE, record]


def _is_alone(run: Run) -> bool:
    """Whether the run has one rank, which is not restarted: it needs no torchrun."""
    return processes(run) == run.ranks.nnodes == 1 and not run.ranks.max_restarts


def _rendezvous(run: Run) -> tuple[str, int]:
    ranks = run.ranks
    place = node_meeting.place_named(ranks.rendezvous or "")
    if isinstance(place, tuple) and ranks.node_rank < ranks.nnodes:
        return place
    raise ReshardError(
        "rendezvous-local",
        "the nodes cannot find each other",
        expected="--nnodes N --node-rank 0…N-1 --rendezvous HOST:PORT, with the host of node 0 on all of them",
        found=f"--nnodes {ranks.nnodes} --node-rank {ranks.node_rank} --rendezvous {ranks.rendezvous}",
        remedy="pass each node its own --node-rank, and all nodes the same --rendezvous",
    )


def ahead(run: Run, looking: bytes | None = None) -> Torchrun | None:
    """Start torchrun during the preflight, with ranks that import what they need, and then wait for `launch`.

    The first one goes on with the preflight, `looking`, in pickled form.

    Returns None if another launcher starts the ranks, if several nodes have to meet first, or if it cannot be started.
    """
    with suppress(ReshardError, ImportError, OSError):  # the preflight reports it
        if run.ranks.nnodes == 1 and launched_rank(run) is None:
            near = next(each for each in run.output.absolute().parents if each.exists())
            return Torchrun.start(command(run), environment(run), near, run, looking)
    return None


def wait_for_first(run: Run) -> None:
    """Wait until the first node has checked the run. Raises ReshardError if it refuses.

    Other launchers end all their ranks with the first.
    """
    if run.ranks.node_rank and launched_rank(run) is None:
        node_meeting.wait_for_first(*_rendezvous(run))


def refuse(run: Run, problems: list[Problem]) -> None:
    """Let the nodes that wait for this one end as well."""
    if run.ranks.nnodes > 1 and launched_rank(run) is None:
        with suppress(ReshardError):  # without an address, no node waits
            node_meeting.refuse(_rendezvous(run)[1], run.ranks.nnodes - 1, problems)


def of_node(run: Run, name: str) -> str:
    """A file name for each node: nodes may share one output."""
    stem, dot, suffix = name.partition(".")
    return f"{stem}-node{run.ranks.node_rank}{dot}{suffix}" if run.ranks.node_rank else name


def environment(run: Run, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of the ranks: without variables of earlier launches, and with no more threads than cores."""
    told = start_environment() if given is None else dict(given)
    forget(told)
    for name, value in _defaults(run, one_node=run.ranks.nnodes == 1).items():
        told.setdefault(name, value)
    return told


def _defaults(run: Run, *, one_node: bool) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = {
        "OMP_NUM_THREADS": str(max(cores // processes(run), 1)),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if one_node and Path("/sys/class/net/lo").exists():
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # otherwise by the host's name, which may not resolve
    return defaults


def launch(
    run: Run,
    record: Mapping[str, Any] | None = None,
    *,
    started: Torchrun | None = None,
    screen: RunScreen | None = None,
) -> int:
    """Train on all ranks. Returns the exit status.

    0: trained, `finish` can begin. 1: a rank failed, and the reason was printed. 128 and above: a signal ended the run.
    `record` is added to run.json, and `started` is the result of `ahead`. Raises ReshardError if ranks refuse to
    continue.
    """
    trackers.check(run)
    screen = screen or RunScreen()
    place = launched_rank(run)
    if place:
        return _take(place, run, record or {}, screen)
    words = command(run)
    _prepare(run, record or {})
    if not screen.quiet:
        screen.console.print(f"[dim]$ {escape(shlex.join(words))}[/]")
    if started is None or started.process.poll() is not None:
        started = Torchrun.start(words, environment(run), run.output)
    ranks = _follow(started, run, screen)
    return _told(run, started.process.returncode, ranks, screen)


def _prepare(run: Run, record: Mapping[str, Any]) -> None:
    """Write the run's record, and move or remove the files of an earlier attempt."""
    run.output.mkdir(parents=True, exist_ok=True)
    log = run.output / of_node(run, LOG_FILE)
    if log.exists():
        older = len(list(run.output.glob(f"{log.stem}-before-*{log.suffix}")))
        log.rename(log.with_name(f"{log.stem}-before-{older + 1}{log.suffix}"))
    if run.ranks.node_rank == 0:
        for name in (PROBLEMS_FILE, TRAINED_FILE, *(() if run.resume else (METRICS_FILE,))):
            (run.output / name).unlink(missing_ok=True)
    put(run.output / of_node(run, RUN_RECORD), record_of(run, record))


@dataclass
class _Ranks(Watcher):
    """The ranks while they run: a Watcher of their metrics, and what to do about signals."""

    run: Run
    display: ProgressDisplay
    tail: MetricsTail
    progress: TrainerProgress = field(default_factory=lambda: TrainerProgress(nan_steps=0))
    """Of their metrics; that their losses are finite, they check themselves."""
    first: int = 0
    """The first signal."""
    training: bool = False
    """Whether the ranks have begun training, so that they finish their step."""
    stop: str = ""
    """Why the ranks stopped, according to them."""
    asked: tuple[int, ...] = ()
    """The ranks of this node that were asked to stop."""
    at_once: bool = False
    """Whether Ctrl-C was pressed again."""
    late: bool = False
    """Whether they exceeded their time."""

    def tick(self, now: float, processes: Processes) -> Iterable[Notice]:
        """Show new rows of the metrics."""
        for row in self.tail.rows():
            self.display.add(row)
            self._read(row, now)
        self.display.look()
        return ()

    def _read(self, row: MetricsRow, now: float) -> None:
        self.training = self.training or row["event"] == "begin"
        if row["event"] == "stop":
            self.first, self.stop = self.first or int(row["signal"]), str(row["why"])
        elif "step" in row:
            list(
                self.progress.line(
                    OutputLine(now, "metrics", f"step {row['step']}/{self.display.history.total}")
                )
            )

    def ask_to_end(self, number: int, process: subprocess.Popen[bytes]) -> float:
        """Make the ranks finish and save their step, or end if there is none. Returns the seconds that they get.

        The ranks are signalled directly: torchrun would kill them after 30 seconds. A second Ctrl-C ends them at once.
        """
        if self.first and number == signal.SIGINT:
            self.at_once = True
            return 0.0
        self.tick(time.time(), {})
        self.first = self.first or number
        if not self.training or self.stop:
            process.terminate()
            return TORCHRUN_END_SECONDS
        self.asked = tuple(children(process.pid))
        for rank in self.asked:
            with suppress(ProcessLookupError):
                os.kill(rank, self.first)
        return self.run.save_on_signal

    def kill(self) -> None:
        """End what the ranks that were asked to stop have left behind. Each leads a process group."""
        for rank in self.asked:
            with suppress(ProcessLookupError):
                os.killpg(rank, signal.SIGKILL)

    def told(self) -> str:
        """How the run ended, in words."""
        if self.stop or not self.first:
            return self.stop
        if self.late:
            return str(signals.late(self.first, self.run.save_on_signal))
        why = "no step was finished" if not self.training else "the ranks ended without finishing their step"
        return str(signals.StoppedRun(self.first, why=why))


def _follow(torchrun: Torchrun, run: Run, screen: RunScreen) -> _Ranks:
    """Follow the ranks until they end."""
    display = ProgressDisplay(run, screen.console, quiet=screen.quiet)
    ranks = _Ranks(run, display, MetricsTail(run.output / METRICS_FILE))
    for row in ranks.tail.rows():  # rows of earlier attempts
        display.history.add(row)
    stall = StallWatcher(ranks.progress, partial(read_stack, folder=torchrun.folder), EVALUATION_LIMITS)
    with torchrun, display:
        relay = OutputRelay.kept(run.output / of_node(run, LOG_FILE), torchrun.output)
        torchrun.go()
        outcome = supervise(
            lambda: torchrun.process,
            relay,
            [ranks, stall, MemoryWatcher()],
            partial(print_notice, console=screen.console),
            asked=ranks.ask_to_end,
            apart=True,
            tick=POLL_SECONDS,
        )
    ranks.kill()
    ranks.tick(time.time(), {})
    ranks.late = outcome.killed and not ranks.at_once
    return ranks


def _told(run: Run, status: int, ranks: _Ranks, screen: RunScreen) -> int:
    """Report how the ranks ended. Returns the exit status of the command."""
    log = run.output / of_node(run, LOG_FILE)
    if ranks.first:
        interrupted(run, ranks.told(), screen, log)
        return 128 + ranks.first
    problems = claimed(run.output)
    if problems:
        raise _refused(run, problems, screen)
    if status == 0 and (run.ranks.node_rank > 0 or (run.output / TRAINED_FILE).is_file()):
        end(run, "trained")
        return 0
    failure = failure_of_ranks(run, log, status, ranks=int(_is_alone(run)))
    end(run, "failed", failure, screen.language)
    print_end(run, failure, screen, log)
    return FAILED_STATUS


def _refused(
    run: Run, problems: list[Problem], screen: RunScreen, place: LaunchedRank | None = None
) -> ReshardError:
    """The error if ranks refuse to continue. Before the first step it is not a failure, and nothing was left behind."""
    from reshard.guard.end.failure import Failure  # with the doctor

    failure = Failure.of_problems(problems, "the run", "was stopped")
    if not begun(run.output):
        end(run, "refused", failure, place=place)
        return ReshardError(problems)
    end(run, "failed", failure, place=place)
    print_end(run, None, screen, place=place)
    return RunFailedError(problems)


def interrupted(
    run: Run,
    how: str,
    screen: RunScreen | None = None,
    log: Path | None = None,
    place: LaunchedRank | None = None,
) -> None:
    """Report which signal ended a run, and what is left of it."""
    from reshard.guard.end.failure import Failure  # with the doctor

    failure = Failure("the run", (), (), f"was {how}")
    end(run, "interrupted", failure, place=place)
    print_end(run, failure, screen or RunScreen(), log, place)


def _take(place: LaunchedRank, run: Run, record: Mapping[str, Any], screen: RunScreen) -> int:
    """Run the rank that another launcher has started. Rank 0 writes and shows what reshard's launcher otherwise would.

    Other settings of that launcher stay: the engine refuses those that contradict the plan.
    """
    os.environ.update(place.environment())
    run = replace(run, ranks=replace(run.ranks, nproc=place.local_world_size or 0, node_rank=0))
    for name, value in _defaults(run, one_node=place.local_world_size == place.world_size).items():
        os.environ.setdefault(name, value)
    first = place.rank == 0
    if first:
        _prepare(run, record)
        if not screen.quiet:
            screen.console.print(f"in the place that {place.launcher} gave: rank 0 of {place.world_size}")
    display = ProgressDisplay(run, screen.console, quiet=screen.quiet or not first)

    def by_signal(stop: signals.StoppedRun) -> None:
        interrupted(run, str(stop), screen, place=place)

    try:
        with display, signals.listening(run.save_on_signal, by_signal if first else None):
            work(run, monitor_of(run, [display.add, *trackers.listeners(run)] if first else []))
            if number := signals.heard():
                raise signals.StoppedRun(number, why="all steps are done, and the final folder is not made")
    except ReshardError as error:
        if not claim(run.output, error.problems):
            return REFUSED_STATUS
        raise _refused(run, error.problems, screen, place) from None
    except signals.StoppedRun as stop:
        if first:
            by_signal(stop)
        return stop.status
    except Exception as error:
        if failure := failure_of_rank(run, place.rank, error):
            end(run, "failed", failure, screen.language, place)
            print_end(run, failure, screen, place=place)
        else:
            screen.console.print(f"rank {place.rank} ended as well: {type(error).__name__}", markup=False)
        return FAILED_STATUS
    if first:
        end(run, "trained")
    return 0
