"""torchrun starts during the preflight: its ranks wait, and leave nothing behind if the run is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from reshard.guard.supervise.child_processes import children
from reshard.training.launching import launch
from reshard.training.launching.end_of_run import RunScreen
from reshard.training.run import Run, RunProcesses
from tests.train.launches import REPOSITORY, is_alive, pids, start, until

Make = Callable[..., Run]
LOOKING = """
import signal, sys
from pathlib import Path
from reshard.training.launching import launch
from reshard.training.run import Run
launch.WORKER_MODULE = "tests.train.ranks"
with launch.ahead(Run.read(Path(sys.argv[1]))) as started:
    print(started.process.pid, flush=True)
    signal.pause()
"""
"""A launcher whose preflight never ends."""


def leftovers(folder: Path) -> list[Path]:
    return [*folder.rglob(".reshard-train-*")]


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.slow
def test_a_run_that_is_refused_leaves_nothing_behind(nproc: int, make_run: Make, tmp_path: Path) -> None:
    run = make_run(ranks=RunProcesses(nproc=nproc))
    started = launch.ahead(run)
    assert started and leftovers(tmp_path)
    with started:
        until(lambda: any(children(started.process.pid)))
        ranks = [*children(started.process.pid)]
    until(lambda: not any(map(is_alive, [started.process.pid, *ranks])))
    assert not leftovers(tmp_path) and not run.output.exists()


@pytest.mark.parametrize(
    "sent",
    [
        signal.SIGKILL,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGTERM)),
    ],
)
def test_a_launcher_that_ends_while_it_looks_leaves_nothing_behind(
    sent: signal.Signals, make_run: Make, tmp_path: Path
) -> None:
    record = tmp_path / "asked.json"
    record.write_text(json.dumps(make_run(ranks=RunProcesses(nproc=1)).as_dict()))
    words = [sys.executable, "-c", LOOKING, str(record)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=REPOSITORY
    ) as looking:
        assert looking.stdout
        torchrun = int(looking.stdout.readline())
        until(lambda: any(children(torchrun)))
        ranks = [*children(torchrun)]
        os.kill(looking.pid, sent)
    until(lambda: not any(map(is_alive, [torchrun, *ranks])))
    until(lambda: not leftovers(tmp_path))


@pytest.mark.slow
def test_a_single_rank_is_started_without_torchrun_and_ends_with_the_launcher(
    make_run: Make, tmp_path: Path
) -> None:
    run = make_run(ranks=RunProcesses(nproc=1), steps=1000, seconds=0.05)
    process = start(run)
    rank, child = pids(run.output)
    words = Path(f"/proc/{rank}/cmdline").read_text().split("\0")
    (parent,) = children(process.pid)
    assert "torch.distributed.run" not in [*words, *Path(f"/proc/{parent}/cmdline").read_text().split("\0")]
    assert [*children(parent)] == [rank]
    process.kill()
    until(lambda: not any(map(is_alive, [parent, rank])))
    until(lambda: not leftovers(tmp_path))
    os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_a_torchrun_that_has_ended_meanwhile_is_started_again(make_run: Make) -> None:
    run = make_run(ranks=RunProcesses(nproc=1))
    started = launch.ahead(run)
    assert started
    with started:
        started.process.kill()
        started.process.wait()
        assert launch.launch(run, started=started, screen=RunScreen(quiet=True)) == 0


def test_ranks_are_started_ahead_only_where_they_can_wait(make_run: Make, tmp_path: Path) -> None:
    """Other nodes would take torchrun's store as the signal to start."""
    assert launch.ahead(make_run(ranks=RunProcesses(2, 2, 0, "127.0.0.1:29500"))) is None
    file = tmp_path / "file"
    file.write_text("")
    assert launch.ahead(Run("sft", tmp_path, file, file / "deep" / "out")) is None
