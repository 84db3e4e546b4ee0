"""`--on slurm` on clusters that have no accounting, short arrays, no controller, and jobs that are killed."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import reshard
from bench.models import make
from reshard.base.errors import ReshardError
from reshard.cluster import plan_parts, slurm_executor
from reshard.cluster.slurm_executor import opened
from reshard.transfer.leftovers import unfinished
from tests import slurm_cluster, spreading
from tests.commandline import reshard as command
from tests.commandline import within
from tests.spreading import content
from tests.test_many_machines import SAVED, SIZES

pytest.importorskip("submitit")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "model", SIZES)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts, and short pauses."""
    monkeypatch.setattr(plan_parts, "MIN_PART_BYTES", 1 << 20)
    monkeypatch.setattr(slurm_executor, "POLL_SECONDS", 0.3)
    monkeypatch.setattr(slurm_executor, "GRACE_SECONDS", 2.0)


Commands = Callable[..., Path]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Make Slurm's commands scripts, in a new folder that is then searched first."""

    def made(**scripts: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        for name, script in {"srun": "", "scancel": "", **scripts}.items():
            (folder / name).write_text(f"#!/bin/bash\n{script}\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return folder

    return made


ACCEPTS = 'cat "$1" >> "$0.scripts"; n=$(grep -c "^#!/bin" "$0.scripts"); echo "Submitted batch job $n"'
LIMIT = 'echo "MaxArraySize            = 5"'
REFUSES = 'echo "slurm_load_ctl_conf error: Unable to contact slurm controller" >&2; exit 1'


def convert(model: Path, dst: Path, **more: Any) -> Any:
    return reshard.convert(model, dst, on="slurm:nodes=3,cpus_per_task=1", **SAVED, **more)


def test_a_machine_without_a_controller_is_told(commands: Commands, model: Path, tmp_path: Path) -> None:
    commands(sbatch=REFUSES, squeue=REFUSES, scontrol=REFUSES)
    result = command(
        "convert", model, tmp_path / "dst", "--to", "megatron", "--no-tokenizer", "--on", "slurm"
    )
    assert result.code == 2 and "Slurm does not respond" in result.err
    assert "Unable to contact slurm controller" in result.err
    assert [each.name for each in tmp_path.iterdir()] == ["bin"]


def test_a_job_that_slurm_refuses_is_told(commands: Commands, model: Path, tmp_path: Path) -> None:
    commands(sbatch='echo "sbatch: error: invalid partition" >&2; exit 1', squeue="", scontrol=LIMIT)
    result = command(
        "convert", model, tmp_path / "dst", "--to", "megatron", "--no-tokenizer", "--on", "slurm"
    )
    assert result.code == 2 and "Slurm refused the job" in result.err and "invalid partition" in result.err
    assert not (tmp_path / "dst").exists()


NEWLINE = "x\ntouch executed"


@pytest.mark.parametrize(
    ("name", "on"),
    [(NEWLINE, "slurm"), ("dst", f"slurm:partition={NEWLINE}"), ("a%x", "slurm"), ("a\\b", "slurm")],
)
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_special_characters_do_not_reach_the_script_of_a_job(
    commands: Commands, model: Path, tmp_path: Path, name: str, on: str, more: list[str]
) -> None:
    folder = commands(sbatch=ACCEPTS, squeue="", scontrol=LIMIT)
    words = ["convert", model, tmp_path / name, "--to", "megatron", "--no-tokenizer", "--on", on, *more]
    result = command(*words, "--json")
    assert result.code == 2 and result.json["problems"][0]["code"] == "slurm-special-character"
    assert [each.name for each in tmp_path.iterdir()] == ["bin"] and not (folder / "sbatch.scripts").exists()


def test_long_arrays_are_split(commands: Commands, tmp_path: Path) -> None:
    folder = commands(sbatch=ACCEPTS, squeue="", scontrol=LIMIT)
    with opened("slurm:nodes=12") as executor:
        assert len(executor.submit(str, range(12), tmp_path)) == 12
    arrays = re.findall(r"(?m)^#SBATCH --array=0-(\d+)%(\d+)$", (folder / "sbatch.scripts").read_text())
    assert [int(last) + 1 for last, _ in arrays] == [5, 5, 2]
    assert all(int(most) > int(last) for last, most in arrays)  # all may run at the same time


@pytest.mark.parametrize("squeue", ["", 'echo "7 N/A"', "exit 1"], ids=["empty", "others", "no answer"])
@pytest.mark.slow
def test_jobs_that_are_gone_do_not_hang_the_run(
    commands: Commands, model: Path, tmp_path: Path, squeue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_executor, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(slurm_executor, "GRACE_SECONDS", 0.5)
    commands(sbatch=ACCEPTS, squeue=squeue, scontrol=LIMIT)
    with within(100), pytest.raises(ReshardError, match="workers died") as error:
        convert(model, tmp_path / "dst")
    assert "Slurm job" in str(error.value) and not (tmp_path / "dst").exists()


@pytest.mark.thorough
def test_jobs_in_the_queue_are_waited_for(commands: Commands, tmp_path: Path) -> None:
    commands(sbatch=ACCEPTS, squeue='printf "1 0\\n1 2\\n"', scontrol=LIMIT)
    with opened("slurm:nodes=4") as executor:
        futures = executor.submit(str, range(3), tmp_path)
        assert "left the queue" in str(futures[1].exception(20))
        time.sleep(0.5)
        assert [each.done() for each in futures] == [False, True, False]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    if not slurm_cluster.is_installed():
        pytest.skip("there is no Slurm: apt-get install slurm-wlm, as root")
    folder = tmp_path / "slurm"
    folder.mkdir()
    with slurm_cluster.cluster(folder) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", "kill"])
def test_slurm_without_accounting_writes_what_threads_write(
    cluster: Path, model: Path, tmp_path: Path, how: str
) -> None:
    """In several arrays, and with a job that is killed."""
    reshard.convert(model, tmp_path / "threads", **SAVED)
    dst = tmp_path / "jobs"
    if how:
        with spreading.killer(dst) as killed:
            convert(model, dst)
        assert killed
    else:
        convert(model, dst)
    assert content(dst) == content(tmp_path / "threads")


@pytest.mark.slow
def test_what_jobs_wrote_is_kept_if_slurm_refuses_more(
    cluster: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst = tmp_path / "jobs"

    def close(count: int) -> None:
        monkeypatch.setenv("SLURM_CONF", "/nonexistent")

    monkeypatch.setattr(slurm_executor, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(slurm_executor, "ANSWER_SECONDS", 2)
    with spreading.killer(dst), pytest.raises(ReshardError, match=r"refused the job|workers died"):
        convert(model, dst, on_bytes=close)
    assert unfinished(dst)[0].nbytes and not dst.exists()
