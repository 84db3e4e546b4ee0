"""`--requeue N`: when a job is requeued, how often, and with which command it continues; with a real Slurm, if any."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reshard.base.errors import Problem
from reshard.base.languages import Text
from reshard.runs.checks.command.read_command import StartedProgram
from reshard.runs.checks.finding import Finding
from reshard.runs.guard.end.end_report import EndedCommand, continuing, ended
from reshard.runs.guard.end.failure import Failure
from reshard.runs.guard.end.requeue import is_cured, requeue, restarts
from reshard.runs.guard.options import GuardOptions
from reshard.runs.guard.supervise.supervision import CommandOutcome
from tests import slurm_cluster

DATA = Path(__file__).parents[1] / "data"
SWIFT = StartedProgram(("swift", "sft", "--model", "m"), module="swift.cli.sft")


def failure(code: str) -> Failure:
    text = Text.same("")
    return Failure("rank 1", (), (Finding(code=code, message=text, rule=text, remedy=text),))


def test_what_a_new_start_cures() -> None:
    assert is_cured(10, None) and is_cured(15, None) and not is_cured(2, None)
    assert is_cured(0, failure("killed-by-signal")) and is_cured(0, failure("hang-nccl"))
    assert not is_cured(0, failure("loss-not-finite")) and not is_cured(0, failure("short-container-memory"))


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `scontrol` that notes what it is asked for. Returns its notes."""
    notes = tmp_path / "notes"
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin/scontrol"
    script.write_text(f'#!/bin/sh\necho "$@" >> {notes}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4217")
    return notes


def test_a_job_is_requeued_at_most_so_often(scontrol: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert requeue(2) == "job 4217 is requeued (1 of 2), and continues from the last checkpoint"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert requeue(2) == "job 4217 is requeued (2 of 2), and continues from the last checkpoint"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert "not requeued again: it was 2 times" in str(requeue(2))
    assert scontrol.read_text() == "requeue 4217\n" * 2
    monkeypatch.setenv("SLURM_NODEID", "1")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert requeue(2) == "", "the first node does it"
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.delenv("SLURM_NODEID")
    assert requeue(2) == "", "this is no job"
    assert scontrol.read_text() == "requeue 4217\n" * 2


def test_a_refusal_is_a_problem(tmp_path: Path, scontrol: Path) -> None:
    (tmp_path / "bin/scontrol").write_text("#!/bin/sh\necho Requested operation is disabled >&2; exit 1\n")
    problem = requeue(1)
    assert isinstance(problem, Problem) and problem.found == "Requested operation is disabled"


def run(tmp_path: Path, started: StartedProgram) -> EndedCommand:
    (tmp_path / "output.log").touch()
    return EndedCommand(started, tmp_path / "output.log", tmp_path, DATA / "torchtitan/llama")


def test_a_run_that_could_only_begin_again_is_not_requeued(tmp_path: Path, scontrol: Path) -> None:
    preempted = CommandOutcome(143, 15)
    without = ended(run(tmp_path, StartedProgram(("python", "own.py"))), preempted, GuardOptions(requeue=1))
    assert without.requeued == "" and not scontrol.exists()
    assert "is requeued" in str(ended(run(tmp_path, SWIFT), preempted, GuardOptions(requeue=1)).requeued)
    assert ended(run(tmp_path, SWIFT), preempted, GuardOptions()).requeued == ""
    assert ended(run(tmp_path, SWIFT), CommandOutcome(130, 2), GuardOptions(requeue=1)).requeued == "", (
        "Ctrl-C"
    )


def test_a_requeued_job_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = run(tmp_path, SWIFT)
    assert continuing(ran, GuardOptions(requeue=1)) is None
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert restarts() == 1 and continuing(ran, GuardOptions()) is None
    step = DATA / "torchtitan/llama/checkpoint/step-1"
    assert continuing(ran, GuardOptions(requeue=1)) == (*SWIFT.words, "--resume_from_checkpoint", str(step))


JOB = f"""#!/bin/bash
#SBATCH --requeue
#SBATCH --open-mode=append
export PYTHONPATH={Path(__file__).parents[2] / "src"}
exec {sys.executable} -c '
import time
from reshard.runs.guard.end.requeue import requeue, restarts
print("start", restarts(), flush=True)
print(requeue(2), flush=True)
time.sleep(60 if restarts() < 2 else 0)
'
"""


@pytest.mark.skipif(not slurm_cluster.is_installed(), reason="needs slurmctld, slurmd, munged and root")
def test_a_real_slurm_starts_the_job_again(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(JOB)
    with slurm_cluster.cluster(tmp_path) as variables:
        environment = {**os.environ, **variables}
        words = ["sbatch", f"--output={tmp_path}/out", str(tmp_path / "job.sh")]
        subprocess.run(words, env=environment, check=True, cwd=tmp_path)
        deadline, jobs = time.monotonic() + 400, ["squeue", "-h", "-o", "%i"]
        while time.monotonic() < deadline:  # until it has left the queue, and its processes have ended
            queued = subprocess.run(jobs, env=environment, capture_output=True, text=True).stdout.split()
            if not queued:
                break
            for job in queued:  # Slurm waits for two minutes before it starts a requeued job again
                subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], env=environment)
            time.sleep(1)
    text = (tmp_path / "out").read_text()
    assert [line for line in text.splitlines() if line.startswith("start")] == [
        "start 0",
        "start 1",
        "start 2",
    ]
