"""Convert: plan, check the destination, compare copies that must be equal, execute, publish."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError, cause_of, raise_all
from reshard.base.quantities import size
from reshard.cluster.part_worker import Execute, absolute, executing_on, identity_of
from reshard.commands.destinations import Stage, destination_at, single_file
from reshard.commands.options import RunOptions
from reshard.folders.companion_names import RECORD
from reshard.formats import detect
from reshard.formats.options import ConversionOptions
from reshard.hub.push import Upload
from reshard.planning import plan_conversion, with_format
from reshard.records.reshard_json import (
    check_unchanged,
    is_written,
    read_back,
    with_record,
    without_record,
    write_record,
)
from reshard.transfer.compare import unequal_replicas
from reshard.transfer.journal import Journal
from reshard.transfer.leftovers import continuing_facts
from reshard.transfer.memory_budget import MemoryMeter, ThreadShare, shared
from reshard.transfer.plan import Plan
from reshard.transfer.run_state import RunTotals


@dataclass(frozen=True, repr=False)
class Conversion:
    """The result of `convert`: the plan, and the report of its execution (None after a dry run).

    `share` is the memory of each thread, and `warnings` are about the destination. `push` describes the repository that
    the output is for (`url`, `new`, `private`), and `uploaded` is its address once the output is
    there. `single` is the file of the plan that becomes the destination, called `name`, if that is no folder.
    """

    plan: Plan
    share: ThreadShare
    report: RunTotals | None = None
    warnings: list[Problem] = field(default_factory=list)
    push: dict[str, Any] | None = None
    uploaded: str | None = None
    single: str | None = None
    name: str = ""

    @property
    def files(self) -> list[tuple[str, int]]:
        """The files of the output, by their paths below the destination, or its name if it is one itself."""
        planned = [(file.path, file.size) for file in self.plan.files]
        return (
            [(self.name, size) for path, size in planned if path == self.single] if self.single else planned
        )

    def __repr__(self) -> str:
        done = f"{size(self.report.nbytes)} written" if self.report else "nothing written"
        return f"<Conversion {self.plan!r}: {done}>"

    def as_dict(self) -> dict[str, Any]:
        """The content of `convert --json`."""
        plan = self.plan
        return {
            **plan.facts,
            "files": [{"path": path, "bytes": nbytes} for path, nbytes in self.files],
            "tensors": plan.tensors,
            "parameters": plan.parameters,
            "bytes": sum(nbytes for _, nbytes in self.files),
            "notes": plan.notes,
            "warnings": [warning.as_dict() for warning in (*plan.warnings, *self.warnings)],
            "written": self.report.nbytes if self.report else 0,
            "resumed": self.report.resumed if self.report else 0,
            "nonfinite": self.report.nonfinite if self.report else [],
            "push": self.push,
            "uploaded": self.uploaded,
        }


def convert(
    source: Path, target: Path, options: ConversionOptions, how: RunOptions | None = None
) -> Conversion:
    """Plan, check and convert. `target` appears when it is complete, or stays as it was. Raises ReshardError."""
    how = how or RunOptions()
    how.check(target)
    destination = destination_at(target, how)
    options = with_format(options, target)
    recorded = options.as_dict()
    if how.on is not None:
        source, options = absolute(source, options)

    meter = MemoryMeter(how.limit)
    _refuse_exchanged(source, target)
    try:
        plan = plan_conversion(source, options, how.on_step, meter)
    except ReshardError as error:
        raise ReshardError([*error.problems, *destination.early_problems(source)]) from cause_of(error)
    identity = identity_of(plan, options, checksum=how.checksum)
    facts = {
        "command": how.command,
        "options": recorded | ({} if plan.suffix else {"max_shard_size": options.shard_size}),
        "plan": identity.digest,
        "checksums": how.checksum,
    }
    single = single_file(plan, target, how)
    plan = with_record(plan, facts)
    upload = Upload(how.push, plan, identity.digest) if how.push else None
    if upload:
        plan = replace(plan, notes=[*plan.notes, upload.note])
    how.on_plan(plan)

    left = meter.left(plan.need)
    for_uploads = destination.upload_memory(left)
    share = shared(how.workers, left - for_uploads, plan.need, plan.sources.paths)
    result = Conversion(plan, share, push=upload.place if upload else None, single=single, name=target.name)
    is_there = upload is not None and is_written(target, plan, identity.digest)
    if is_there:
        if not how.dry_run:
            check_unchanged(target, share.threads)
        how.on_resume(
            f"{target} is already complete, and is what this command writes: only the upload remains", 0
        )
    else:
        result = replace(result, warnings=destination.check(plan, share.threads))
    if how.dry_run:
        return result
    if upload:
        upload.create()

    if is_there:
        report = RunTotals(plan.nbytes, plan.nbytes)
    else:
        journal = Journal(
            None if how.no_resume else identity,
            continuing_facts(how.command, plan.nbytes),
            sources=plan.sources,
            durable=how.sync,
        )
        with (
            executing_on(how.on, source, options, plan, how.checksum, how.limit, how.workers) as execute,
            destination.stage(plan, single, journal, for_uploads // share.threads) as stage,
        ):
            report = _write_files(execute, plan, facts, share, how, journal, stage)
    result = replace(result, report=report)
    if upload:
        upload.send(target, options, how.on_upload)
        result = replace(result, uploaded=upload.url)
    return result


def _refuse_exchanged(source: Path, target: Path) -> None:
    if not source.exists() and target.exists() and detect(target):
        raise ReshardError(
            "source-and-output-exchanged",
            "the source does not exist, and the output is a checkpoint",
            file=str(source),
            rule="the source comes first, then the output",
            found=f"a checkpoint in {target}",
            remedy=f"if you meant to convert that one, swap the paths: {shlex.join([str(target), str(source)])}; "
            "otherwise check the first one",
        )


def _write_files(
    execute: Execute,
    plan: Plan,
    facts: dict[str, Any],
    share: ThreadShare,
    how: RunOptions,
    journal: Journal,
    stage: Stage,
) -> RunTotals:
    """Write the files of a plan and their record to a stage, and check what they show."""

    def on_lost(nbytes: int) -> None:
        stage.on_resume(
            f"{size(nbytes)} of them changed on the disk since they were written, and are written again",
            journal.progress.nbytes,
        )

    # The ledger of the run adds to what an open journal records.
    with plan.sources.unchanged(journal.progress.passed if how.checksum else None):
        if not journal.progress.equal:
            raise_all(unequal_replicas(plan.replicas, share))
            journal.add({"replicas": "equal"})
        report = execute(
            without_record(plan),
            stage.folder,
            share=share,
            checksum=how.checksum,
            on_bytes=stage.on_bytes,
            on_file=stage.on_file,
            on_lost=on_lost,
            journal=journal,
        )
        raise_all(report.problems(strict=how.strict))
        nbytes = stage.sizes[RECORD] = write_record(plan, stage.folder, report, facts, journal)
        report.nbytes += nbytes
        stage.on_bytes(nbytes)
        stage.finish()
        if how.verify:
            read_back(stage.home, report.digests, share.threads)
    return report
