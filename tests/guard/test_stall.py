"""Runs that stand still are reported with their cause, and good runs are not."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reshard.runs.guard.watch import stacks
from reshard.runs.guard.watch.process_tree import Process, Processes, ranks_of
from reshard.runs.guard.watch.stacks import Frame, Stack, py_spy, read_stack
from reshard.runs.guard.watch.stall import StallLimits, StallWatcher
from reshard.runs.guard.watch.trainer_progress import TrainerProgress
from reshard.runs.guard.watch.watcher import OutputLine
from tests.guard.watched import SCRIPTS, TORCHRUN, Watched, watch

SHORT = StallLimits(startup=240, stall=240, look=1.5, again=0.75, window=0.3)
"""The limits by default, divided by forty; but a busy machine may take minutes to start ranks."""
LAUNCH = (sys.executable, SCRIPTS / "launch.py", "2")


def run(
    command: Sequence[str | Path], folder: Path | None = None, limits: StallLimits = SHORT, **given: Any
) -> Watched:
    """A run, watched. `folder` is where scripts announce themselves."""
    progress = TrainerProgress()
    return watch(
        command, progress, StallWatcher(progress, partial(read_stack, folder=folder), limits), **given
    )


def plain(*actions: str, before: Sequence[str | Path] = (sys.executable,), **given: Any) -> Watched:
    """A run without torch."""
    return run((*before, SCRIPTS / "plain.py", *actions), **given)


def meeting() -> dict[str, str]:
    """Where ranks meet that no torchrun has started."""
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(each.getsockname()[1])}


def gloo(
    *actions: str,
    folder: Path,
    before: Sequence[str | Path] = TORCHRUN,
    environment: Mapping[str, str] | None = None,
    **given: Any,
) -> Watched:
    """A run of two ranks, under torchrun or another launcher."""
    variables = {
        "SCRATCH": str(folder),
        "RESHARD_GUARD": str(folder),
        "ANNOUNCED": "1",
        **({} if before is TORCHRUN else meeting()),
        **(environment or {}),
    }
    return run((*before, SCRIPTS / "gloo.py", *actions), folder, environment=variables, **given)


Runs = Callable[[str], Watched]


def at_once(runs: Mapping[str, Callable[[], Watched]]) -> Iterator[Runs]:
    """The results of several runs by name. They mostly wait. Py-spy gets all the time that a busy machine takes."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(7) as pool:
        patch.setattr(stacks, "_PATIENCE", 60)
        done = {
            name: pool.submit(partial(good, run) if name.startswith("good") else run)
            for name, run in runs.items()
        }
        yield lambda name: done[name].result()


def good(run: Callable[[], Watched]) -> Watched:
    """A run that must not be reported; once more if it was: a machine can hold a process back for a second or two."""
    seen = run()
    return run() if seen.codes else seen


def stop_rank_1(processes: Processes, seen: Watched, stopped: list[int]) -> None:
    """Stop it once it trains."""
    ranks = ranks_of(processes)
    if not stopped and 1 in ranks and any("/100000" in line or "loss" in line for line in seen.lines):
        stopped.append(ranks[1].pid)
        os.kill(stopped[0], signal.SIGSTOP)


@pytest.fixture(scope="module")
def stopped() -> list[int]:
    """The process that is stopped in the run `stopped`."""
    return []


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Runs of two ranks that communicate."""
    run = partial(gloo, folder=tmp_path_factory.mktemp("ranks"))
    yield from at_once(
        {
            # a first step of 100 steps, an evaluation, a save and a map of 100, and pauses as long as a look
            "good": partial(
                run,
                *("map:2", "compute:2", "step:20", "compute:2", "step:20", "save:2", "step:5", "pause:1.5"),
                *("accumulate:1", "step:20"),
            ),
            "data": partial(run, "step:10", "pause:9", "step:50"),
            "deadlock": partial(run, "step:20", "deadlock", before=LAUNCH, until=1),
        }
    )


@pytest.fixture(scope="module")
def more_ranks(tmp_path_factory: pytest.TempPathFactory, stopped: list[int]) -> Iterator[Runs]:
    """Further runs of two ranks, each until something is said."""
    run = partial(gloo, folder=tmp_path_factory.mktemp("ranks"), before=LAUNCH, until=1)
    yield from at_once(
        {
            "importing": partial(run, "step:20", environment={"NEVER_IMPORTS": "1"}),
            "loader": partial(run, "step:20", "loader"),
            "stopped": partial(run, "step:5000", act=partial(stop_rank_1, stopped=stopped)),
        }
    )


@pytest.mark.thorough
def test_a_good_run_is_not_reported(ranks: Runs) -> None:
    seen = ranks("good")
    assert (seen.code, seen.codes) == (0, []), seen.text


@pytest.mark.slow
def test_a_good_run_with_the_limits_by_default(tmp_path: Path) -> None:
    """A pause of 60 s in the data, and a map, a first step, an evaluation and a save that are longer than a look."""
    seen = gloo(
        *(
            "map:70",
            "compute:70",
            "step:50",
            "compute:70",
            "step:20",
            "save:70",
            "step:5",
            "pause:60",
            "step:5",
        ),
        folder=tmp_path,
        limits=StallLimits(),
        every=1,
        most=900,
    )
    assert (seen.code, seen.codes) == (0, []), seen.text


def continue_rank_1() -> Callable[[Processes, Watched], None]:
    """Stop it once it trains, and continue it a second after this was reported."""
    stopped: list[int] = []

    def act(processes: Processes, seen: Watched) -> None:
        stop_rank_1(processes, seen, stopped)
        if seen.notices and time.time() - seen.start - seen.notices[0][0] > 1:
            with suppress(ProcessLookupError):
                os.kill(stopped[0], signal.SIGCONT)

    return act


def end_in_debugger() -> Callable[[Processes, Watched], None]:
    """End the command after four seconds in the debugger."""
    since: list[float] = []

    def act(processes: Processes, seen: Watched) -> None:
        if any("(Pdb)" in line for line in seen.lines):
            since.append(time.time())
        if since and time.time() - since[0] > 4:
            os.kill(min(processes), signal.SIGTERM)

    return act


@pytest.fixture(scope="module")
def plain_runs() -> Iterator[Runs]:
    """Runs without torch; one rank waits in it for another, which has ended."""
    one, late = (sys.executable,), {"ENDS_EARLY": "1"}
    yield from at_once(
        {
            "good: slow start": partial(
                plain, "idle:4", "step:3", before=one
            ),  # nothing is known before a step
            "good: pause": partial(plain, "step:10", "idle:2", "step:3", before=one),
            "good: worker": partial(plain, "step:10", "worker:3", "step:3", before=one),
            "good: words": partial(plain, "talk:4", before=one),
            "good: server": partial(plain, "step:10", "serve:5", "step:3", before=one),
            "good: ranks": partial(plain, "busy:3", "step:10", "busy:3", "step:1", before=LAUNCH),
            "good: one rank ends": partial(plain, "busy:3", "step:3", before=LAUNCH, environment=late),
            "stopped": partial(plain, "step:80", before=LAUNCH, act=continue_rank_1()),
            "debugger": partial(plain, "step:5", "pdb", stdin=subprocess.PIPE, act=end_in_debugger()),
            "ended": partial(plain, "meet", before=LAUNCH, environment={**late, **meeting()}, until=1),
        }
    )


@pytest.fixture(scope="module")
def single_runs() -> Iterator[Runs]:
    """Runs of one process that are idle, or compute without end."""
    limits = replace(SHORT, stall=5, startup=4)
    yield from at_once(
        {
            "idle": partial(plain, "step:10", "idle:9", "step:40"),
            "loop": partial(plain, "step:10", "busy:100", limits=limits, until=1),
            "start": partial(plain, "busy:100", limits=limits, until=1),
        }
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["slow start", "pause", "worker", "words", "server", "ranks", "one rank ends"]
)
def test_good_runs_without_torch_are_not_reported(name: str, plain_runs: Runs) -> None:
    seen = plain_runs(f"good: {name}")
    assert (seen.code, seen.codes) == (0, []), seen.text


@pytest.mark.thorough
def test_a_stopped_rank_is_reported_once_though_others_go_on(plain_runs: Runs) -> None:
    seen = plain_runs("stopped")
    assert (seen.code, seen.codes) == (0, ["rank-stopped", "run-goes-on"])


@pytest.mark.thorough
def test_a_person_in_the_debugger_is_not_reported(plain_runs: Runs) -> None:
    assert py_spy() is not None
    seen = plain_runs("debugger")
    assert seen.codes == [] and any("(Pdb)" in line for line in seen.lines)


@pytest.mark.thorough
def test_ranks_that_wait_for_one_in_its_data(ranks: Runs) -> None:
    seen = ranks("data")
    assert (seen.code, seen.codes) == (0, ["run-stands-still", "run-goes-on"]), seen.text
    assert "since step 10 of 100000; rank 0 waits for rank 1" in seen.text
    assert re.search(r"rank 0: waits in all_reduce, called at \S+gloo.py:\d+ all_ranks", seen.text)
    assert re.search(r"rank 1: idle at \S+gloo.py:\d+ pause_in_data", seen.text)


@pytest.mark.slow
def test_a_rank_that_never_finishes_importing(more_ranks: Runs) -> None:
    seen = more_ranks("importing")
    assert seen.codes == ["run-stands-still"]
    assert "since the start; rank 0 waits for rank 1" in seen.text
    assert re.search(r"rank 1: idle at \S+gloo.py:\d+ <module>", seen.text)


@pytest.mark.thorough
def test_ranks_in_different_collectives(ranks: Runs) -> None:
    seen = ranks("deadlock")
    assert seen.codes == ["run-stands-still"] and "all ranks wait" in seen.text
    assert "rank 0: waits in recv" in seen.text and "rank 1: waits in barrier" in seen.text


@pytest.mark.slow
def test_a_data_loader_that_gives_nothing(more_ranks: Runs) -> None:
    seen = more_ranks("loader")
    assert seen.codes == ["run-stands-still"] and "rank 0 waits for rank 1" in seen.text
    assert re.search(r"its data loader: \S+gloo.py:\d+ Slow.__getitem__ \(by py-spy\)", seen.text)


@pytest.mark.slow
def test_a_rank_that_stays_stopped(more_ranks: Runs, stopped: list[int]) -> None:
    seen = more_ranks("stopped")
    assert seen.codes == ["rank-stopped"]
    assert f"rank 1 (process {stopped[0]})" in seen.text and f"kill -CONT {stopped[0]}" in seen.text


@pytest.mark.thorough
def test_a_rank_that_has_ended(plain_runs: Runs) -> None:
    """The other one waits for it to join."""
    seen = plain_runs("ended")
    assert seen.codes == ["run-stands-still"]
    assert "rank 0 waits for rank 1" in seen.text and "rank 1: ended" in seen.text


@pytest.mark.slow
def test_without_a_collective(single_runs: Runs) -> None:
    """One process that waits, or computes, is reported at the limits."""
    idle, loop, start = map(single_runs, ("idle", "loop", "start"))
    assert (idle.code, idle.codes) == (0, [])
    assert loop.codes == start.codes == ["run-stands-still"]
    assert loop.notices[0][0] > 5 and "rank 0: busy at " in loop.text
    assert start.notices[0][0] > 4 and "since the start" in start.text


def test_a_rank_whose_stack_cannot_be_read_is_told_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without py-spy, the report says how to see the line of code."""
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    progress = TrainerProgress()
    list(progress.line(OutputLine(1000.0, "step 1 loss 2.0")))
    watcher = StallWatcher(progress, lambda process: Stack(kernel="sleeping, in pipe_read of the kernel"))
    process = Process(7, 1, None, "S", 1.0)
    (seen,) = [notice for now in range(1000, 1700, 5) for notice in watcher.tick(float(now), {7: process})]
    assert seen.lines == (
        "rank 0: idle (sleeping, in pipe_read of the kernel) (by /proc), process 7",
        "to see the line of code where each rank is, install py-spy: python -m pip install py-spy",
    )


def test_one_process_that_waits_is_reported_at_the_limit() -> None:
    """It is not ended before that, even with `--on-stall stop`. The innermost call says what it waits for."""
    frames = (
        Frame("/home/user/venv/lib/python3.11/site-packages/torch/utils/file_baton.py", 49, "FileBaton.wait"),
        Frame("/home/user/venv/lib/python3.11/site-packages/torch/utils/cpp_extension.py", 2000, "load"),
        Frame("/home/user/train.py", 7, "main"),
    )
    progress = TrainerProgress()
    list(progress.line(OutputLine(1000.0, "step 1 loss 2.0")))
    watcher = StallWatcher(progress, lambda process: Stack(frames, "py-spy"), stop=True)
    process = Process(7, 1, None, "S", 1.0)
    seen = [notice for now in range(1000, 1700, 5) for notice in watcher.tick(float(now), {7: process})]
    (notice,) = seen
    assert (notice.problem.code, notice.stop) == ("run-stands-still", True)
    assert str(notice.problem.found).startswith("no progress for 600 s")
    assert notice.lines == (
        "rank 0: idle in FileBaton.wait (torch/utils/file_baton.py:49), called at /home/user/train.py:7 main "
        "(by py-spy), process 7",
    )
