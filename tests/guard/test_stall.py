"""Runs that stand still are reported with their cause, and good runs are not."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from pathlib import Path

from reshard.guard.processes import Processes, ranks_of
from reshard.guard.progress import Progress
from reshard.guard.stacks import read_stack
from reshard.guard.stall import Limits, Stall
from tests.guard.watched import SCRIPTS, TORCHRUN, Watched, watch

SHORT = Limits(startup=30, stall=20, look=1.5, again=0.75, window=0.3)
"""The limits by default, divided by forty."""


def watched(*actions: str, folder: Path, limits: Limits = SHORT, **given: object) -> Watched:
    """A run of two ranks under torchrun."""
    progress = Progress()
    stall = Stall(progress, partial(read_stack, folder=folder), limits)
    environment = {
        "SCRATCH": str(folder),
        "RESHARD_GUARD": str(folder),
        "ANNOUNCED": "1",
        **given.pop("environment", {}),
    }  # type: ignore[dict-item]
    command = (*TORCHRUN, SCRIPTS / "gloo.py", *actions)
    return watch(command, progress, stall, environment=environment, **given)  # type: ignore[arg-type]


def test_a_good_run_is_not_reported(tmp_path: Path) -> None:
    """The first step takes 50 steps, an evaluation 150, a save 150, a map 150, and data pauses as long as a look."""
    seen = watched(
        *("map:3", "compute:3", "step:20", "compute:3", "step:20", "save:3", "step:5", "pause:1.5"),
        *("accumulate:1", "accumulate:1", "step:20", "pause:1.5", "step:1"),
        folder=tmp_path,
    )
    assert (seen.code, seen.codes) == (0, []), seen.text


def test_ranks_that_wait_for_one_in_its_data(tmp_path: Path) -> None:
    seen = watched("step:20", "pause:8", "step:20", folder=tmp_path)
    assert seen.codes == ["run-stands-still", "run-goes-on"], seen.text
    assert "rank 0 waits for rank 1" in seen.text
    assert re.search(r"rank 0: waits in all_reduce, called at \S+gloo.py:\d+ all_ranks", seen.text)
    assert re.search(r"rank 1: idle at \S+gloo.py:\d+ pause_in_data", seen.text)
    assert seen.code == 0


def test_a_worker_that_never_finishes_importing(tmp_path: Path) -> None:
    seen = watched("step:20", folder=tmp_path, until=1, environment={"NEVER_IMPORTS": "1"})
    assert seen.codes == ["run-stands-still"]
    assert "rank 0 waits for rank 1" in seen.text and "since no step" in seen.text
    assert re.search(r"rank 1: idle at \S+gloo.py:\d+ <module>", seen.text)


def test_ranks_in_different_collectives(tmp_path: Path) -> None:
    seen = watched("step:20", "deadlock:1", folder=tmp_path, until=1)
    assert seen.codes == ["run-stands-still"]
    assert "all ranks wait" in seen.text
    assert "rank 0: waits in recv" in seen.text and "rank 1: waits in barrier" in seen.text


def test_a_stopped_rank(tmp_path: Path) -> None:
    stopped: list[int] = []

    def act(passed: float, processes: Processes, lines: list[str]) -> None:
        if not stopped and any("/100000" in line for line in lines):
            stopped.append(ranks_of(processes)[1].pid)
            os.kill(stopped[0], signal.SIGSTOP)

    seen = watched("step:5000", folder=tmp_path, until=1, act=act)
    assert seen.codes == ["rank-stopped"]
    assert f"rank 1 (process {stopped[0]})" in seen.text and f"kill -CONT {stopped[0]}" in seen.text
