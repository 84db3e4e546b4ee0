"""Runs that stand still are reported with their cause, and good runs are not."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reshard.guard.watch.processes import Processes, ranks_of
from reshard.guard.watch.progress import Progress
from reshard.guard.watch.stacks import py_spy, read_stack
from reshard.guard.watch.stall import Limits, Stall
from tests.guard.watched import SCRIPTS, TORCHRUN, Watched, watch

SHORT = Limits(startup=20, stall=15, look=1.5, again=0.75, window=0.3)
"""The limits by default, divided by forty."""
LAUNCH = (sys.executable, SCRIPTS / "launch.py", "2")


def run(
    command: Sequence[str | Path], folder: Path | None = None, limits: Limits = SHORT, **given: Any
) -> Watched:
    """A run, watched. `folder` is where scripts announce themselves."""
    progress = Progress()
    return watch(command, progress, Stall(progress, partial(read_stack, folder=folder), limits), **given)


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


def at_once(*runs: Callable[[], Watched]) -> list[Watched]:
    """The results of several runs, which mostly wait."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda each: each(), runs))


def test_a_good_run_is_not_reported(tmp_path: Path) -> None:
    """A first step of 100 steps, an evaluation, a save and a map of 100, and pauses as long as a look."""
    seen = gloo(
        *("map:2", "compute:2", "step:20", "compute:2", "step:20", "save:2", "step:5", "pause:1.5"),
        *("accumulate:1", "step:20"),
        folder=tmp_path,
    )
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
        limits=Limits(),
        every=1,
        most=900,
    )
    assert (seen.code, seen.codes) == (0, []), seen.text


def test_good_runs_without_torch_are_not_reported() -> None:
    one, two = (sys.executable,), LAUNCH
    runs = at_once(
        partial(plain, "idle:4", "step:3", before=one),  # nothing is known of a process before its first step
        partial(plain, "step:10", "idle:2", "step:3", before=one),
        partial(plain, "step:10", "worker:4", "step:3", before=one),
        partial(plain, "talk:4", before=one),
        partial(plain, "step:10", "serve:5", "step:3", before=one),
        partial(plain, "busy:3", "step:10", "busy:3", "step:1", before=two),
        partial(plain, "busy:3", "step:3", before=two, environment={"ENDS_EARLY": "1"}),
    )
    for seen in runs:
        assert (seen.code, seen.codes) == (0, []), seen.text


def test_a_stopped_rank_is_reported_once_though_others_go_on() -> None:
    stopped: list[int] = []

    def act(passed: float, processes: Processes, lines: list[str]) -> None:
        ranks = ranks_of(processes)
        if not stopped and 1 in ranks and lines:
            stopped.append(ranks[1].pid)
            os.kill(stopped[0], signal.SIGSTOP)
        if stopped and passed > 4:
            os.kill(stopped[0], signal.SIGCONT)

    seen = plain("step:80", before=LAUNCH, act=act)
    assert (seen.code, seen.codes) == (0, ["rank-stopped", "run-goes-on"])


def test_a_person_in_the_debugger_is_not_reported() -> None:
    def act(passed: float, processes: Processes, lines: list[str]) -> None:
        if passed > 5:
            os.kill(min(processes), signal.SIGTERM)

    assert py_spy() is not None
    seen = plain("step:5", "pdb", stdin=subprocess.PIPE, act=act)
    assert seen.codes == [] and any("(Pdb)" in line for line in seen.lines)


def test_ranks_that_wait_for_one_in_its_data(tmp_path: Path) -> None:
    seen = gloo("step:10", "pause:5", "step:5", folder=tmp_path)
    assert (seen.code, seen.codes) == (0, ["run-stands-still", "run-goes-on"]), seen.text
    assert "since step 10 of 100000; rank 0 waits for rank 1" in seen.text
    assert re.search(r"rank 0: waits in all_reduce, called at \S+gloo.py:\d+ all_ranks", seen.text)
    assert re.search(r"rank 1: idle at \S+gloo.py:\d+ pause_in_data", seen.text)


def test_ranks_that_wait_for_ever(tmp_path: Path) -> None:
    """One never finishes importing; different collectives; a data loader that gives nothing; a stopped rank."""
    stopped: list[int] = []

    def stop(passed: float, processes: Processes, lines: list[str]) -> None:
        if not stopped and any("/100000" in line for line in lines):
            stopped.append(ranks_of(processes)[1].pid)
            os.kill(stopped[0], signal.SIGSTOP)

    importing, deadlock, loading, stopping = at_once(
        partial(gloo, "step:20", folder=tmp_path, until=1, environment={"NEVER_IMPORTS": "1"}),
        partial(gloo, "step:20", "deadlock", before=LAUNCH, folder=tmp_path, until=1),
        partial(gloo, "step:20", "loader", before=LAUNCH, folder=tmp_path, until=1),
        partial(gloo, "step:5000", before=LAUNCH, folder=tmp_path, until=1, act=stop),
    )
    assert importing.codes == ["run-stands-still"]
    assert "since the start; rank 0 waits for rank 1" in importing.text
    assert re.search(r"rank 1: idle at \S+gloo.py:\d+ <module>", importing.text)
    assert deadlock.codes == ["run-stands-still"]
    assert "all ranks wait" in deadlock.text
    assert "rank 0: waits in recv" in deadlock.text and "rank 1: waits in barrier" in deadlock.text
    assert loading.codes == ["run-stands-still"] and "rank 0 waits for rank 1" in loading.text
    assert re.search(r"its data loader: \S+gloo.py:\d+ Slow.__getitem__ \(by py-spy\)", loading.text)
    assert stopping.codes == ["rank-stopped"]
    assert f"rank 1 (process {stopped[0]})" in stopping.text and f"kill -CONT {stopped[0]}" in stopping.text


def test_a_rank_that_has_ended() -> None:
    """The other one waits for it to join."""
    seen = plain("meet", before=LAUNCH, environment={"ENDS_EARLY": "1", **meeting()}, until=1)
    assert seen.codes == ["run-stands-still"]
    assert "rank 0 waits for rank 1" in seen.text and "rank 1: ended" in seen.text


def test_without_a_collective() -> None:
    """Everything idle is reported after two looks; what computes, only at the limits."""
    limits = replace(SHORT, stall=5, startup=4)
    idle, loop, start = at_once(
        partial(plain, "step:10", "idle:7", "step:3"),
        partial(plain, "step:10", "busy:100", limits=limits, until=1),
        partial(plain, "busy:100", limits=limits, until=1),
    )
    assert (idle.code, idle.codes) == (0, ["run-stands-still", "run-goes-on"])
    assert "since step 9" in idle.text and "rank 0: idle at " in idle.text
    assert 3.5 < idle.notices[0][0] < 6.5
    assert loop.codes == start.codes == ["run-stands-still"]
    assert loop.notices[0][0] > 5 and "rank 0: busy at " in loop.text
    assert start.notices[0][0] > 4 and "since the start" in start.text
