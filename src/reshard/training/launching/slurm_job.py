"""A run as a Slurm job, submitted by submitit: one task per node, which starts its ranks by torchrun.

Before the job's time limit, or when it is preempted, Slurm sends SIGUSR1: the ranks finish their step and save, and the
job is requeued and continues from there.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from reshard.base.errors import ReshardError
from reshard.base.missing_packages import install_command
from reshard.cluster.slurm_executor import (
    accepted,
    check_texts,
    nodes_of,
    parameters_of,
    settings_error,
    submitit_executor,
)
from reshard.guard.supervise.signal_passing import PassedSignals
from reshard.training.engine_registry import engine_of
from reshard.training.launching.rank_environment import port_of
from reshard.training.launching.run_record import words_of
from reshard.training.option_checks import without_package
from reshard.training.output_folder import JOBS_FOLDER
from reshard.training.run import Run

END_SIGNAL = signal.SIGUSR1
PREEMPT_VARIABLE = "SUBMITIT_PREEMPT_SIGNAL"
"""The variable from which submitit reads that signal, without SIG."""
NOTICE_SECONDS = 300
"""Seconds before a job's time limit at which it receives the signal, unless `signal_delay_s` is set."""
MAX_REQUEUES = 1_000_000
"""How often submitit may requeue a job: practically without limit."""


@dataclass(frozen=True)
class SubmittedJob:
    """A submitted job. `log` is the output of its first task."""

    number: str
    log: Path

    def as_dict(self) -> dict[str, str]:
        """For `--json`."""
        return {"job": self.number, "log": str(self.log)}


def submission_of(run: Run, settings: str) -> tuple[Run, dict[str, Any]]:
    """The settings of `--slurm NAME=VALUE,…` for `submit`, and the run with its nodes and processes.

    Raises ReshardError. Their `cluster` is where submitit sends it: "slurm", or "local" for this machine.
    """
    if not find_spec("submitit"):
        raise ReshardError(without_package("--slurm", f"{install_command('submitit')} here and on all nodes"))
    pairs = [each.partition("=") for each in settings.split(",") if each]
    wrong = [f"{name}{equals}{value}" for name, equals, value in pairs if not (name and equals and value)]
    if wrong or not pairs:
        raise settings_error(", ".join(wrong) or settings)
    given = {name.strip().replace("-", "_"): value.strip() for name, _, value in pairs}
    cluster = given.pop("cluster", "slurm")
    nodes, gpus = nodes_of(given.get("nodes", str(run.ranks.nnodes))), given.get("gpus_per_node", "")
    _agreed("nnodes", run.ranks.nnodes, 1, nodes)
    found: dict[str, Any] = {**parameters_of(given), "nodes": nodes, "tasks_per_node": 1}
    found["stderr_to_stdout"] = True
    found.setdefault("name", run.output.name)
    minutes = found["timeout_min"]
    if not isinstance(minutes, int) or minutes < 1:
        raise settings_error(f"time={minutes}")
    found.setdefault("slurm_signal_delay_s", min(NOTICE_SECONDS, minutes * 60 // 4))
    if cluster == "slurm":
        more = {
            "signal": f"{END_SIGNAL.name.removeprefix('SIG')}@{found['slurm_signal_delay_s']}",
            "requeue": True,
        }
        found["slurm_additional_parameters"] = more
    check_texts(run.output)
    with TemporaryDirectory() as folder:
        submitit_executor(Path(folder), cluster, found)
    nproc = run.ranks.nproc
    if gpus.isdecimal() and int(gpus):  # nodes without GPUs take any number
        _agreed("nproc", nproc, 0, int(gpus))
        nproc = nproc or int(gpus)
    ranks = replace(run.ranks, nnodes=nodes, nproc=nproc, rendezvous=None, node_rank=0)
    return replace(run, ranks=ranks), {**found, "cluster": cluster}


def _agreed(name: str, asked: int, unsaid: int, given: int) -> None:
    if asked not in (unsaid, given):
        raise ReshardError(
            "slurm-disagrees",
            f"--slurm and --{name} disagree",
            expected=f"--{name} {asked}",
            found=f"{given} in --slurm",
            remedy=f"leave out --{name}",
        )


def submit(run: Run, settings: Mapping[str, Any], *, overwrite: bool = False) -> SubmittedJob:
    """Submit a run. Raises ReshardError if Slurm rejects it."""
    os.environ[PREEMPT_VARIABLE] = END_SIGNAL.name.removeprefix("SIG")  # the job inherits this environment
    parameters = dict(settings)
    cluster, notice = parameters.pop("cluster"), int(settings["slurm_signal_delay_s"])
    seconds = min(run.save_on_signal, max(notice - 30, notice // 2))
    job = SlurmJob(replace(run, save_on_signal=seconds), overwrite=overwrite)
    timeouts = {f"{cluster}_max_num_timeout": MAX_REQUEUES}
    executor = submitit_executor(run.output / JOBS_FOLDER, cluster, parameters, **timeouts)
    with accepted():
        submitted = executor.submit(job)
    return SubmittedJob(str(submitted.job_id), Path(submitted.paths.stdout))


@dataclass(frozen=True)
class SlurmJob:
    """The function that submitit calls on each node. `again` is set each time that the job is requeued."""

    run: Run
    overwrite: bool = False
    again: bool = False

    def __call__(self) -> None:
        """Run `reshard train` on this node, and requeue the job if a signal ended it."""
        requeue: Any = signal.getsignal(END_SIGNAL)  # submitit's own handler, which calls `checkpoint`
        before = engine_of(self.run).checkpoints.last(self.run.output)
        with PassedSignals((END_SIGNAL, signal.SIGTERM, signal.SIGINT), apart=True) as received:
            child = subprocess.Popen(self.words(before is not None))
            while (status := child.poll()) is None:
                select.select([received.descriptor], [], [])
                for number in filter(received.to_pass, received.come()):
                    child.send_signal(number)
        if status == 0:
            return
        if received.first != END_SIGNAL or status != 128 + END_SIGNAL:
            sys.exit(status)
        saved = engine_of(self.run).checkpoints.last(self.run.output) != before
        if not saved and requeue.__self__.has_timed_out():
            print("the time of the job is too short to save a step: raise time= in --slurm", flush=True)
            sys.exit(status)
        requeue(END_SIGNAL, None)
        sys.exit(status)  # on other nodes: the first node has requeued the job

    def checkpoint(self) -> Any:
        """The function that submitit requeues."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(replace(self, again=True))

    def words(self, saved: bool) -> list[str]:
        """The command of this node. After an interruption it continues from the last checkpoint if one was `saved`."""
        import submitit

        place = submitit.JobEnvironment()
        again = self.again or int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0
        ranks = self.run.ranks
        if place.num_nodes > 1:
            port = port_of(int("".join(filter(str.isdecimal, place.job_id))))
            ranks = replace(ranks, node_rank=place.node, rendezvous=f"{place.hostnames[0]}:{port}")
        run = replace(self.run, ranks=ranks, resume=self.run.resume or (again and saved))
        overwrite = ["--overwrite"] * (not run.resume and (self.overwrite or again))
        return [sys.executable, "-m", *words_of(run), *overwrite]
