"""`--slurm`: the submitted job, refusals, and a job of submitit's local executor that is interrupted."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reshard import train as train_from_python
from reshard.base.missing_packages import install_command
from reshard.guard.supervise.child_processes import children
from reshard.training.launching import slurm_job
from reshard.training.run import Run
from reshard.training.show.metrics import history_of
from tests.commandline import Result, reshard
from tests.train.launches import until

SBATCH = """#!/bin/bash
cp "$1" "$RECORD" && echo Submitted batch job 4217
"""
"""Accepts a job in Slurm's place, and keeps its arguments."""


PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def documented() -> list[str]:
    """The arguments of the documentation's command that submits a job."""
    (command,) = re.findall(
        r"(?m)^reshard (train sft (?:.*\\\n)*.*--slurm .*)$", PAGE.read_text(encoding="utf-8")
    )
    return shlex.split(command.replace("\\\n", " "))


@pytest.fixture
def words(tiny: Callable[..., Path], data: dict[str, Path], tmp_path: Path) -> list[object]:
    """A small run, except for `--slurm`."""
    run = ["--model", tiny("qwen2"), "--data", data["sft"], "-o", tmp_path / "out", "--max_steps", 6]
    return ["sft", *run, "--save_steps", 100, "--per_device_train_batch_size", 2]


def train(words: list[object], *more: object) -> Result:
    return reshard("train", *words, *more)


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm commands that accept jobs and run none; returns the script of the last submitted job."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "srun"):
        (folder / name).write_text(SBATCH)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(tmp_path / "job.sh"))
    return tmp_path / "job.sh"


def test_a_job_is_submitted_for_its_nodes(queue: Path, words: list[object], tmp_path: Path) -> None:
    example = documented()
    at = example.index("-o") + 2
    result = train(words, *example[at:-1], f"{example[-1]},account=llm")
    assert result.code == 0, result.err
    log = tmp_path / "out" / "slurm" / "4217_0_log.out"
    assert result.out.splitlines()[:2] == ["submitted job 4217", f"log: {log}"]
    asked = dict(re.findall(r"(?m)^#SBATCH --([\w-]+)(?:=(.*))?$", queue.read_text()))
    expected = {"partition": "gpu", "nodes": "2", "gpus-per-node": "8", "time": "720", "account": "llm"}
    expected |= {"ntasks-per-node": "1", "signal": "USR1@300", "requeue": "", "job-name": "out"}
    assert expected.items() <= asked.items()
    assert asked["output"] == str(log).replace("4217", "%j")
    assert "FSDP2 on 16 processes" in result.err and "does not fit" not in result.err


def test_python_submits_the_same_job(queue: Path, words: list[object], tmp_path: Path) -> None:
    model, data = words[2], words[4]
    assert isinstance(model, Path) and isinstance(data, Path)
    settings = "partition=gpu,nodes=2,gpus_per_node=1"
    asked: dict[str, Any] = {"model": model, "data": data, "output": tmp_path / "out", "slurm": settings}
    assert train_from_python("sft", **asked, dry_run=True).submitted is None and not queue.exists()
    outcome = train_from_python("sft", **asked)
    assert outcome and outcome.submitted and outcome.submitted.number == "4217"
    assert "#SBATCH --nodes=2" in queue.read_text()


def test_a_job_names_its_node_and_the_first(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = slurm_job.submission_of(make_run(), "cluster=local")
    place = {"SLURM_JOB_ID": "4217", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_PROCID": "1"}
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    for name, value in {**place, "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    run = slurm_job.replace(run, ranks=slurm_job.replace(run.ranks, nnodes=2))
    said = " ".join(slurm_job.SlurmJob(run).words(saved=True))
    assert "--nnodes 2 --node-rank 1 --rendezvous gpu07:24217" in said and "--resume" not in said
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # after a preemption that Slurm itself has answered
    assert slurm_job.SlurmJob(run).words(saved=True)[-1] == "--resume"
    assert slurm_job.SlurmJob(run).words(saved=False)[-1] == "--overwrite", "no step was saved"


def test_nodes_without_gpus_take_any_number_of_processes(make_run: Callable[..., Run]) -> None:
    run, _ = slurm_job.submission_of(make_run(), "cluster=local,gpus_per_node=0")
    assert run.ranks.nproc == 2


REFUSED = {
    "": "invalid settings for Slurm",
    "partition": "partition",
    "cluster=local,nodes=many": "nodes=many",
    "cluster=local,time=long": "time=long",
    "cluster=local,time=0": "time=0",
    "cluster=local,colour=red": "Unknown argument 'colour'",
    "partition=gpu": "`sbatch` not found",
    "cluster=local,gpus_per_node=4": "--nproc 2",
    "cluster=local,name=a\ntouch b": "special character",
}


@pytest.mark.parametrize("settings", REFUSED)
def test_settings_that_are_none_are_refused(
    words: list[object], tmp_path: Path, settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without Slurm
    result = train(words, "--slurm", settings, "--nproc", 2)
    assert result.code == 2 and REFUSED[settings] in result.err and "Traceback" not in result.err
    assert not (tmp_path / "out").exists()


def test_a_job_that_is_wrong_is_not_submitted(words: list[object], tmp_path: Path) -> None:
    result = train(words, "--learnin_rate", 1, "--slurm", "cluster=local")
    assert result.code == 2 and "did you mean --learning_rate?" in result.err
    assert not (tmp_path / "out").exists()


def test_without_submitit_it_says_how_to_install_it(
    words: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_job, "find_spec", lambda name: None)
    result = train(words, "--slurm", "partition=gpu")
    assert result.code == 2 and install_command("submitit") in result.err


@pytest.mark.slow
def test_a_job_that_is_preempted_goes_on_to_the_same_bits(
    words: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = documented()
    plan = example[example.index("-o") + 2 : -2]
    assert train([*words[:5], "-o", tmp_path / "whole", *words[7:]], *plan).code == 0
    settings = example[-1].replace("partition=gpu,nodes=2,gpus_per_node=8", "cluster=local,gpus_per_node=0")
    submitted = train(words, *plan, "--slurm", settings, "--json")
    assert submitted.code == 0, submitted.err
    told, out = json.loads(submitted.out), tmp_path / "out"
    until(lambda: history_of(out).done >= 1)
    (task,) = children(int(told["job"]))
    os.kill(task, signal.SIGUSR1)
    until(lambda: history_of(out).outcome == "done")
    until(lambda: "Job completed successfully" in Path(told["log"]).read_text())
    said = Path(told["log"]).read_text()
    assert "interrupted by SIGUSR1 after step" in said and "Requeued job" in said and "continues from" in said
    files = [(tmp_path / name / "final" / "model.safetensors").read_bytes() for name in ("whole", "out")]
    assert files[0] == files[1]
