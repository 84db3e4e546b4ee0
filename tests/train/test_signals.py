"""A signal lets the ranks finish and save the current step, and the run continues from there."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from reshard.training import signals
from reshard.training.launching import launch
from reshard.training.launching.end_of_run import RunScreen
from reshard.training.launching.run_record import words_of
from reshard.training.run import Run, RunProcesses
from reshard.training.run_request import run_of
from reshard.training.show.metrics import METRICS_FILE, MetricsTail, append, history_of
from reshard.training.show.progress_display import ProgressDisplay
from tests.train.launches import LAUNCHER, REPOSITORY, TORCHRUN, begin, is_alive, pids, start, until

Make = Callable[..., Run]
GOING: dict[str, Any] = {"steps": 1000, "seconds": 0.05, "save": 1000}
"""Steps that do not end before a signal, and checkpoints that are due later."""


def assert_saved(run: Run, sent: signal.Signals, shown: str) -> None:
    """Assert that all ranks stopped after one step, which is saved, and the run can be continued."""
    history = history_of(run.output)
    checkpoint = run.output / f"checkpoint-{history.done}"
    assert f"interrupted by {sent.name} after step {history.done}, which is saved" in shown
    assert f"the last complete checkpoint: {checkpoint}" in shown and (checkpoint / "weights").is_file()
    assert f"reshard train sft --resume -o {run.output}" in shown
    assert [path.name for path in run.output.glob("checkpoint-*")] == [checkpoint.name]
    assert history.outcome == "interrupted"
    assert "interrupted by" in history.end["failure"]["who"] and "--resume" in history.end["resume"]
    assert not (run.output / "trained.json").exists()


@pytest.mark.parametrize(
    "sent",
    [
        signal.SIGINT,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)
        ),
    ],
)
@pytest.mark.slow
def test_a_signal_to_the_launcher_saves_the_step(sent: signal.Signals, make_run: Make) -> None:
    run = make_run(**GOING)
    process = start(run)
    started = pids(run.output)
    process.send_signal(sent)
    shown = process.communicate(timeout=300)[1]
    assert process.returncode == 128 + sent, shown
    assert len(started) == 4
    until(lambda: not any(is_alive(pid) for pid in started))
    assert_saved(run, sent, shown)


def test_a_signal_right_after_the_start_gives_the_ranks_all_their_time(make_run: Make) -> None:
    """torchrun, which is asked before the start, would kill them after 30 seconds."""
    run = make_run(save_on_signal=77)
    run.output.mkdir()
    ranks = launch._Ranks(
        run, ProgressDisplay(run, Console(), quiet=True), MetricsTail(run.output / METRICS_FILE)
    )
    with subprocess.Popen(["sleep", "60"]) as process:
        append(run.output, {"event": "begin", "steps": 3, "done": 0})
        assert ranks.ask_to_end(signal.SIGTERM, process) == 77
        assert process.poll() is None
        process.kill()


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all_of_them(make_run: Make) -> None:
    run = make_run(**GOING)
    process = start(run)
    os.kill(int((run.output / "pids/1").read_text().split()[0]), signal.SIGTERM)
    shown = process.communicate(timeout=300)[1]
    assert process.returncode == 128 + signal.SIGTERM, shown
    assert_saved(run, signal.SIGTERM, shown)


@pytest.mark.slow
def test_a_signal_to_torchrun_saves_the_step(make_run: Make) -> None:
    run = make_run(**GOING)
    process = start(run, *TORCHRUN)
    process.send_signal(signal.SIGTERM)
    shown = process.communicate(timeout=300)[1]
    assert process.returncode
    assert_saved(run, signal.SIGTERM, shown)
    assert shown.count("in the place that torchrun gave: rank 0 of 2") == 1
    assert "torch.distributed.run --" not in shown


@pytest.mark.slow
def test_a_signal_to_every_task_of_slurm_saves_the_step(make_run: Make) -> None:
    run = make_run(ranks=RunProcesses(), **GOING)
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "127.0.0.1"}
    place = ({"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1"))
    tasks = [begin(run, environment={**step, **each, "GLOO_SOCKET_IFNAME": "lo"}) for each in place]
    until(lambda: history_of(run.output).done >= 2, tasks[0])
    for task in tasks:
        task.send_signal(signal.SIGUSR1)
    shown = [task.communicate(timeout=300)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [128 + signal.SIGUSR1] * 2, shown
    assert_saved(run, signal.SIGUSR1, shown[0])


@pytest.mark.parametrize("before", [(), TORCHRUN])
@pytest.mark.slow
def test_a_step_that_takes_too_long_is_not_saved(before: tuple[str, ...], make_run: Make) -> None:
    """Rank 1 hangs, and rank 0 waits for it in a collective, which no Python handler interrupts."""
    run = make_run(save_on_signal=1, **{**GOING, "fail": "hang", "at": 3, "rank": 1})
    process = start(run, *before)
    started = pids(run.output)
    process.send_signal(signal.SIGTERM)
    shown = process.communicate(timeout=300)[1]
    assert process.returncode == 128 + signal.SIGTERM or before
    assert "interrupted by SIGTERM: the step was not finished and saved within 1 seconds" in shown
    assert "no complete checkpoint was found" in shown
    assert history_of(run.output).outcome == "interrupted"
    until(lambda: not any(is_alive(pid) for pid in started))


def test_a_process_with_many_open_files_hears_it_too() -> None:
    """Like a DataLoader that opens every shard of a dataset."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while stack.enter_context(Path(os.devnull).open("rb")).fileno() < 1024:
            pass
        stack.enter_context(signals.listening(None))
        signals.hold()
        signal.raise_signal(signal.SIGUSR1)
        until(lambda: signals.heard() == signal.SIGUSR1)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGUSR1, signal.SIGTERM])
def test_scancel_to_the_tasks_of_srun_saves_the_step(
    sent: signal.Signals, make_run: Make, tmp_path: Path
) -> None:
    if (
        shutil.which("srun") is None
        or subprocess.run(["srun", "-n2", "true"], capture_output=True).returncode
    ):
        pytest.skip("a cluster is needed: apt-get install slurmctld slurmd slurm-client munge; srun -n2 true")
    run = make_run(**{**GOING, "seconds": 0.2}, ranks=RunProcesses())
    run.output.mkdir()
    record = tmp_path / "asked.json"
    record.write_text(json.dumps(run.as_dict()))
    words = ["srun", "-n2", "-J", tmp_path.name, sys.executable, "-c", LAUNCHER, str(record)]
    process = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    until(lambda: history_of(run.output).done >= 2, process)
    job = subprocess.check_output(["squeue", "-h", "-n", tmp_path.name, "-o", "%i"], text=True).strip()
    subprocess.run(["scancel", f"--signal={sent.name}", f"{job}.0"], check=True)
    shown = process.communicate(timeout=300)[1]
    assert process.returncode == 128 + sent, shown
    assert_saved(run, sent, shown)


@pytest.mark.slow
def test_a_signal_before_the_first_step_ends_the_run_at_once(make_run: Make) -> None:
    run = make_run(**{**GOING, "seconds": 300})
    process = begin(run)
    until(lambda: (run.output / "train.log").exists(), process)
    process.send_signal(signal.SIGTERM)
    shown = process.communicate(timeout=300)[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert "interrupted by SIGTERM: no step was finished" in shown


@pytest.mark.slow
def test_ranks_end_with_a_launcher_that_is_killed(make_run: Make) -> None:
    run = make_run(**GOING)
    process = start(run)
    ranks = pids(run.output)
    process.kill()
    process.communicate()
    until(lambda: not any(is_alive(pid) for pid in ranks))


@pytest.mark.slow
def test_torchrun_starts_failed_ranks_again_from_the_last_checkpoint(make_run: Make) -> None:
    run = make_run(ranks=RunProcesses(nproc=2, max_restarts=1), steps=4, fail="raise", at=3, times=1)
    assert launch.launch(run, screen=RunScreen(quiet=True)) == 0
    rows = [json.loads(line) for line in (run.output / "metrics.jsonl").read_text().splitlines()]
    assert [row["done"] for row in rows if row["event"] == "begin"] == [0, 2]
    assert [row["step"] for row in rows if row["event"] == "step"] == [1, 2, 3, 4]
    assert history_of(run.output).outcome == "trained"


@pytest.mark.slow
def test_what_ranks_refuse_they_are_not_asked_again(make_run: Make) -> None:
    run = make_run(ranks=RunProcesses(nproc=2, max_restarts=2), fail="refuse", at=1)
    with pytest.raises(Exception, match="the plan does not hold"):
        launch.launch(run, screen=RunScreen(quiet=True))
    assert (run.output / "train.log").read_text().count("rank 0 of 2 is there") == 1


def test_what_is_said_of_signals_is_said_again(make_run: Make, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    run = make_run(ranks=RunProcesses(nproc=2, max_restarts=3), save_on_signal=25)
    words = words_of(run)
    flags = {name: getattr(run, name) for name in ("model", "data", "output")}
    assert run_of("sft", flags, words[9:]) == run


STEADY = """
import os, signal, subprocess
import torch
from accelerate.data_loader import DataLoaderShard
from reshard.training import signals

os.setpgid(0, 0)
with signals.listening(None):
    signals.hold()
    loader = DataLoaderShard(torch.arange(20), batch_size=1, num_workers=2)
    for count, batch in enumerate(signals.with_steady_workers(loader), 1):
        for name, at in (("INT", 3), ("USR1", 5), ("TERM", 7)):
            if count == at:
                subprocess.run(["bash", "-c", f"kill -{name} -{os.getpgid(0)}"])
    print(count, signals.heard())
"""


@pytest.mark.thorough
def test_workers_of_a_loader_outlive_a_signal_to_all_processes() -> None:
    done = subprocess.run([sys.executable, "-c", STEADY], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["20", str(int(signal.SIGINT))], done.stderr


BEGINNING = """
import multiprocessing, os, signal, subprocess, sys
import torch
from torch.utils.data import DataLoader
from reshard.training import signals

multiprocessing.set_start_method("forkserver")
os.setpgid(0, 0)
gate, opened = os.pipe()

def wait():
    os.close(opened)
    os.read(gate, 1)

with signals.listening(None):
    signals.hold()
    os.register_at_fork(after_in_child=wait)
    loader = DataLoader(torch.arange(20), num_workers=2, multiprocessing_context=sys.argv[1] or None)
    batches = iter(signals.with_steady_workers(loader))
    for name in ("TERM", "INT", "USR1"):
        subprocess.run(["bash", "-c", f"kill -{name} -{os.getpgid(0)}"])
    os.close(opened)
    print(len(list(batches)), signals.heard())
"""


@pytest.mark.slow
@pytest.mark.parametrize("context", ["", "spawn"])
def test_workers_that_have_just_begun_outlive_it_too(context: str) -> None:
    words = [sys.executable, "-c", BEGINNING, context]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["20", str(int(signal.SIGTERM))], done.stderr
