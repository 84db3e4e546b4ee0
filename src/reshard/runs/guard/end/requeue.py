"""`--requeue N`: a Slurm job that ended for a cause which a new start cures is requeued, and continues.

Slurm sets SLURM_JOB_ID, and SLURM_RESTART_COUNT once it has requeued a job (man sbatch, "OUTPUT ENVIRONMENT
VARIABLES"). Its signals are those of `--signal` and of preemption (man slurm.conf, PreemptParameters, KillWait).
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING

from reshard.base.errors import Problem

if TYPE_CHECKING:
    from reshard.runs.guard.end.failure import Failure

REQUEUE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
CURED_CODES = frozenset(
    (
        *("killed-by-signal", "killed-terminated", "peer-died", "hang-nccl", "hang-gloo", "cuda-ecc"),
        *("nccl-system-error", "nccl-infiniband", "rendezvous-unreachable", "store-barrier-timeout"),
        *("rank-stopped", "run-stands-still"),
    )
)
"""Codes of causes that a new start may cure: a lost rank or node, the network, a rank that did not go on."""
SCONTROL_SECONDS = 60
"""Seconds that scontrol gets."""


def restarts(environment: Mapping[str, str] = os.environ) -> int:
    """How often Slurm has requeued this job."""
    count = environment.get("SLURM_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


def is_cured(number: int, failure: Failure | None) -> bool:
    """Whether a new start may cure the signal, or the failure, by which a run ended."""
    codes = {finding.code for finding in failure.findings} if failure else set()
    return number in REQUEUE_SIGNALS or bool(codes & CURED_CODES)


def requeue(most: int, environment: Mapping[str, str] = os.environ) -> str | Problem:
    """Requeue this job, at most `most` times. Returns what was done, or why not; "" outside of Slurm."""
    job, count = environment.get("SLURM_JOB_ID", ""), restarts(environment)
    if not job or not most or environment.get("SLURM_NODEID", "0") != "0":
        return ""
    if count >= most:
        return f"job {job} is not requeued again: it was {count} times (--requeue {most})"
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_SECONDS, check=False)
        reason = done.stderr.strip() if done.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if reason is None:
        return f"job {job} is requeued ({count + 1} of {most}), and continues from the last checkpoint"
    return Problem(
        "slurm-requeue-failed",
        "Slurm did not requeue the job",
        found=reason,
        rule="a job can be requeued if it was submitted with --requeue (man sbatch)",
        remedy=f"submit the script with #SBATCH --requeue, or requeue it yourself: {' '.join(command)}",
    )
