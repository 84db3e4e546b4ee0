"""Carry out a plan: check the destination, check what must be equal, execute, publish."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from reshard.compare import unequal_replicas
from reshard.errors import Problem, ReshardError
from reshard.execute import Report, execute, worker_count
from reshard.formats import is_replaceable
from reshard.plan import Plan
from reshard.staging import check_target, staged


def check_destination(plan: Plan, source: Path, target: Path, *, overwrite: bool = False) -> None:
    """Raise ReshardError if the result of a plan cannot appear at `target`, with every reason."""
    replaceable = target.is_dir() and is_replaceable(target)
    check_target(source, target, overwrite=overwrite, replaceable=replaceable, needed=plan.nbytes)


def convert(
    plan: Plan,
    source: Path,
    target: Path,
    *,
    overwrite: bool = False,
    memory: int = 1 << 30,
    workers: int | None = None,
    strict: bool = False,
    checksum: bool = True,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Report:
    """Carry out a plan. `target` appears whole, or stays as it was; raises ReshardError."""
    check_destination(plan, source, target, overwrite=overwrite)
    with staged(target, overwrite=overwrite) as folder, plan.sources.unchanged():
        problems = unequal_replicas(plan.replicas, worker_count(workers, memory))
        if problems:
            raise ReshardError(problems)
        report = execute(plan, folder, memory=memory, workers=workers, checksum=checksum, on_bytes=on_bytes)
        if strict and report.nonfinite:
            raise ReshardError([_nonfinite(name) for name in report.nonfinite])
    return report


def _nonfinite(name: str) -> Problem:
    return Problem(
        "a tensor holds NaN or Inf",
        tensor=name,
        rule="weights are finite (--strict)",
        remedy="take an earlier iteration, or leave out --strict to convert it as it is",
    )
