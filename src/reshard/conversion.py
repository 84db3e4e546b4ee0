"""Convert: plan, check the destination, check what must be equal, execute, publish."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from reshard.errors import Problem, ReshardError
from reshard.formats.contents import RECORD, foreign_in
from reshard.formats.record import digests_of, recorded, with_record
from reshard.planning import Options, plan_conversion
from reshard.transfer.compare import unequal_replicas
from reshard.transfer.destination import space_problems, target_problems
from reshard.transfer.execute import Report, execute, worker_count
from reshard.transfer.journal import Identity, Journal, sync
from reshard.transfer.plan import Plan
from reshard.transfer.sources import OnStep
from reshard.transfer.staging import OnResume, put_aside, recover, reusable, staged
from reshard.version import __version__


@dataclass(frozen=True)
class Conversion:
    """A plan, and what passed when it was carried out (None after a dry run). `warnings` are about the destination."""

    plan: Plan
    report: Report | None = None
    warnings: list[Problem] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The content of `convert --json`."""
        plan = self.plan
        return {
            **plan.facts,
            "files": [{"path": file.path, "bytes": file.size} for file in plan.files],
            "tensors": plan.tensors,
            "parameters": plan.parameters,
            "bytes": plan.nbytes,
            "notes": plan.notes,
            "warnings": [warning.as_dict() for warning in (*plan.warnings, *self.warnings)],
            "written": self.report.nbytes if self.report else 0,
            "resumed": self.report.resumed if self.report else 0,
            "nonfinite": self.report.nonfinite if self.report else [],
        }


def convert(
    source: Path,
    target: Path,
    options: Options,
    *,
    dry_run: bool = False,
    overwrite: bool = False,
    memory: int = 1 << 30,
    workers: int | None = None,
    strict: bool = False,
    checksum: bool = True,
    verify: bool = False,
    resume: bool = True,
    command: str = "",
    on_step: OnStep = lambda step: None,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    on_bytes: Callable[[int], None] = lambda count: None,
    on_resume: OnResume = lambda note, nbytes: None,
) -> Conversion:
    """Plan, check and convert. `target` appears whole, or stays as it was; raises ReshardError.

    With `verify` the output is read from the disk, and compared with what was written, before it is published.
    What was written when the system or Ctrl-C ends the run is kept, unless `resume` is false, and the next run for the
    same output continues from there. `command` does so, and is told to whoever finds it.
    """
    plan = plan_conversion(source, options, on_step)
    identity = _identity(plan, options, checksum=checksum)
    facts = {"command": command, "plan": identity.digest, "checksums": checksum}
    plan = with_record(plan, facts)
    on_plan(plan)
    warnings = check_destination(plan, target, overwrite=overwrite, dry_run=dry_run)
    if dry_run:
        return Conversion(plan, warnings=warnings)
    sizes = {file.path: file.size for file in plan.files}
    journal = Journal(
        identity if resume else None, {"command": command, "folder": _here(), "bytes": plan.nbytes}
    )
    stage = staged(target, sizes, overwrite=overwrite, journal=journal, on_resume=on_resume)
    with stage as folder, plan.sources.unchanged():
        if not journal.progress.equal:
            if problems := unequal_replicas(plan.replicas, worker_count(workers, memory)):
                raise ReshardError(problems)
            journal.add({"replicas": "equal"})
        report = execute(
            plan,
            folder,
            memory=memory,
            workers=workers,
            checksum=checksum,
            on_bytes=on_bytes,
            journal=journal,
        )
        if strict and report.nonfinite:
            raise ReshardError([_nonfinite(name) for name in report.nonfinite])
        (folder / RECORD).write_bytes(recorded(plan, report.digests, facts))
        sync(folder / RECORD)
        if verify:
            _read_back(plan, folder, report.digests, worker_count(workers, memory))
        if overwrite and (problems := _in_the_way(plan, target, overwrite)):
            raise ReshardError(problems)  # hours may have passed
    return Conversion(plan, report, warnings)


def _read_back(plan: Plan, folder: Path, digests: Mapping[str, str], workers: int) -> None:
    """Raise ReshardError naming each file of which the disk gives other bytes than were written."""
    found = digests_of(folder, list(digests), workers)
    if wrong := [name for name, digest in digests.items() if name != RECORD and found[name] != digest]:
        raise ReshardError(
            Problem(
                "the disk gives other bytes than were written",
                file=str(folder / name),
                rule="the output is read back and compared (--verify)",
                remedy="the disk, its controller or the memory is faulty: write to another disk",
            )
            for name in wrong
        )


def _here() -> str:
    """The folder in which a command is typed."""
    try:
        return str(Path.cwd())
    except OSError:  # it is gone
        return ""


def _identity(plan: Plan, options: Options, *, checksum: bool) -> Identity:
    """All that decides the bytes of the output: the program, what was read for the plan, the options and the files."""
    wanted = replace(options, base=options.base and options.base.resolve())
    told = sha256(f"{wanted!r} {checksum} {[path.resolve() for path in plan.sources.named]!r}".encode())
    for file in (each for each in plan.files if each.path != RECORD):
        told.update(f"\n{file.path!r} {file.size}".encode())
    return Identity(_program(), plan.sources.digest(), told.hexdigest())


def _program() -> str:
    """A digest of the code that decides what is written: its version says too little of a checkout."""
    package, digest = Path(__file__).parent, sha256(f"{__version__} {np.__version__}".encode())
    for part in ("algebra", "families", "transfer", "formats", "model", "adapters", "planning"):
        for path in sorted((package / part).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def check_destination(
    plan: Plan, target: Path, *, overwrite: bool = False, dry_run: bool = False
) -> list[Problem]:
    """Raise ReshardError if the result of a plan cannot appear at `target`, with every reason; return warnings.

    In a dry run, a disk that is too small is one of them: space may be found until it counts. Any other run first puts
    right what runs that were killed left beside `target`.
    """
    if not dry_run:
        recover(target)
    problems = _in_the_way(plan, target, overwrite)
    too_small = space_problems(target, plan.nbytes - reusable(target))
    problems += [] if dry_run else too_small
    if problems:
        raise ReshardError(problems)
    return [replace(problem, severity="warning") for problem in too_small] + _kept(target)


def _in_the_way(plan: Plan, target: Path, overwrite: bool) -> list[Problem]:
    foreign = foreign_in(target) if overwrite and target.is_dir() else None
    return target_problems(plan.sources.paths, target, foreign=foreign)


def _kept(target: Path) -> list[Problem]:
    """What a run that was killed had moved aside, and something else has taken the place of since."""
    return [
        Problem(
            "a run that was killed left the previous contents of the destination here",
            file=str(path),
            remedy="check whether you still need it, and remove it if not",
            severity="warning",
        )
        for path in (put_aside(target) if target.exists() else [])
    ]


def _nonfinite(name: str) -> Problem:
    return Problem(
        "a tensor holds NaN or Inf",
        tensor=name,
        rule="weights are finite (--strict)",
        remedy="take an earlier iteration, or leave out --strict to convert it as it is",
    )
