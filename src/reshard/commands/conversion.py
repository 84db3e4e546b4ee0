"""Convert: plan, check the destination, compare copies that must be equal, execute, publish."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from reshard.base.errors import Problem, ReshardError, cause_of, size
from reshard.cluster import executors
from reshard.cluster.distribute import spread
from reshard.cluster.part_worker import PartWorker, absolute, identity_of
from reshard.commands.options import RunOptions
from reshard.folders.companions import RECORD
from reshard.formats import detect, named_by, writable, written
from reshard.formats.options import ConversionOptions
from reshard.planning import plan_conversion
from reshard.records.checkpoint_files import foreign_among, foreign_in, is_checkpoint, stays
from reshard.records.reshard_json import (
    check_record,
    digests_of,
    is_written,
    with_record,
    without_record,
    write_record,
)
from reshard.stores import StorePath
from reshard.stores.bucket import Bucket
from reshard.transfer.compare import unequal_replicas
from reshard.transfer.destination import bucket_problems, space_problems, target_problems
from reshard.transfer.execute import execute
from reshard.transfer.journal import Journal
from reshard.transfer.ledger import Passed
from reshard.transfer.leftovers import recover, reusable
from reshard.transfer.memory_budget import MemoryMeter, ThreadShare, shared
from reshard.transfer.overflow import overflow_problem
from reshard.transfer.plan import Plan
from reshard.transfer.run_files import move_aside
from reshard.transfer.run_state import RunTotals
from reshard.transfer.staging import staged
from reshard.transfer.unfinished_marker import marker_in
from reshard.transfer.uploading import Uploads, staging_folder, upload_memory, uploading


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
        found = [(file.path, file.size) for file in self.plan.files]
        return [(self.name, size) for path, size in found if path == self.single] if self.single else found

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
    options = _for_target(options, target)
    given = options
    if how.on is not None:
        source, options = absolute(source, options)
    meter = MemoryMeter(how.limit)
    if not source.exists() and target.exists() and detect(target):
        raise ReshardError(_exchanged(source, target))
    try:
        plan = plan_conversion(source, options, how.on_step, meter)
    except ReshardError as error:
        raise ReshardError([*error.problems, *_also_in_the_way(source, target, how)]) from cause_of(error)
    identity = identity_of(plan, options, checksum=how.checksum)
    facts = {
        "command": how.command,
        "options": given.as_dict() | ({} if plan.suffix else {"max_shard_size": given.shard_size}),
        "plan": identity.digest,
        "checksums": how.checksum,
    }
    single = _single(plan, target, how)
    plan = with_record(plan, facts)
    upload = how.push.begun(plan, identity.digest) if how.push else None
    if upload:
        plan = replace(plan, notes=[*plan.notes, upload.note])
    how.on_plan(plan)
    left = meter.left(plan.need)
    sent = left // 3 if isinstance(target, StorePath) else 0
    share = shared(how.workers, left - sent, plan.need, plan.sources.paths)
    if upload and is_written(target, plan, identity.digest):
        if not how.dry_run:
            _check_before_upload(target, share.threads)
        note = f"{target} is already complete, and is what this command writes: only the upload remains"
        how.on_resume(note, 0)
        result = Conversion(plan, share, None if how.dry_run else RunTotals(plan.nbytes, plan.nbytes))
    else:
        warnings = check_destination(
            plan,
            target,
            None if how.on is not None else share.threads,
            overwrite=how.overwrite,
            dry_run=how.dry_run,
        )
        result = Conversion(plan, share, warnings=warnings)
    result = replace(result, push=upload.place if upload else None, single=single, name=target.name)
    if how.dry_run:
        return result
    if upload:
        upload.create()
    if result.report is None:
        kept = {"command": how.command, "folder": _here(), "bytes": plan.nbytes}
        journal = Journal(
            identity if not how.no_resume else None, kept, sources=plan.sources, durable=how.sync
        )
        work = _Work(plan, target, share, sent // share.threads, journal, facts, how, single)
        result = replace(result, report=work.done_by(source, options))
    if upload:
        upload.send(target, options, how.on_upload)
        result = replace(result, uploaded=upload.url)
    return result


def _for_target(options: ConversionOptions, target: Path) -> ConversionOptions:
    """The options with the format that the name of the destination has. Raises ReshardError without its ranks."""
    format = writable(options.to).name if options.to else named_by(target)
    if options.dp is None and format is not None and written()[format].ranks.data_parallel:
        raise ReshardError(
            "ranks-not-passed",
            f"the number of ranks that will load the output is missing, and {format} has a file for each of them",
            rule="the files are loaded by as many ranks as they were written for",
            expected="--dp N",
            remedy="pass --dp with the number of ranks (GPUs) of the run that will load the output",
        )
    return replace(options, to=format)


def _single(plan: Plan, target: Path, how: RunOptions) -> str | None:
    """The only file of a plan, if the destination has the name of one. Raises ReshardError if it cannot be one."""
    if not plan.suffix or target.suffix != plan.suffix or target.is_dir():
        return None
    files = [file.path for file in plan.files if file.path != RECORD]
    folder = target.with_suffix("")
    found = {
        "a destination in a store": isinstance(target, StorePath),
        "--push-to-hub": how.push is not None,
        f"{len(files)} files": len(files) > 1,
    }
    if why := [what for what, is_so in found.items() if is_so]:
        raise ReshardError(
            "destination-must-be-folder",
            "this output cannot be a single file",
            file=str(target),
            found=", ".join(why),
            remedy=f"choose a folder, such as {folder}"
            + ("; or a larger --max-shard-size" if len(files) > 1 else ""),
        )
    return files[0]


def _exchanged(source: Path, target: Path) -> Problem:
    return Problem(
        "source-and-output-exchanged",
        "the source does not exist, and the output is a checkpoint",
        file=str(source),
        rule="the source comes first, then the output",
        found=f"a checkpoint in {target}",
        remedy=f"if you meant to convert that one, swap the paths: {shlex.join([str(target), str(source)])}; "
        "otherwise check the first one",
    )


def _also_in_the_way(source: Path, target: Path, how: RunOptions) -> list[Problem]:
    """Problems of the destination that can be found without a plan."""
    if how.overwrite or isinstance(target, StorePath) or isinstance(source, StorePath):
        return []
    return target_problems([source], target, foreign=None, single=named_by(target) is not None)


@dataclass(frozen=True)
class _Work:
    """A plan that is about to be executed. `part` bytes of each thread's memory are for uploads to a store.

    `single` is the name of the file that becomes the destination, if that is no folder.
    """

    plan: Plan
    target: Path
    share: ThreadShare
    part: int
    journal: Journal
    facts: Mapping[str, Any]
    how: RunOptions
    single: str | None = None

    def done_by(self, source: Path, options: ConversionOptions) -> RunTotals:
        """Write the output and publish it, on this machine or on those of `on`."""
        how = self.how
        if how.on is None:
            return self._carried_out(execute)
        with executors.opened(how.on) as executor:
            same = identity_of(self.plan, options, checksum=how.checksum, inodes=False)
            worker = PartWorker(
                source, options, same, how.checksum, how.limit, how.workers or executor.threads
            )
            return self._carried_out(partial(spread, executor=executor, perform=worker))

    def _carried_out(self, write: Callable[..., RunTotals]) -> RunTotals:
        """Write the planned files and their record, and publish them."""
        plan, how, journal = self.plan, self.how, self.journal
        sizes = {file.path: file.size for file in plan.files}
        with self._stage(sizes) as (folder, uploads), plan.sources.unchanged(self._passed()):
            if not journal.progress.equal:
                if problems := unequal_replicas(plan.replicas, self.share):
                    raise ReshardError(problems)
                journal.add({"replicas": "equal"})
            report = write(
                without_record(plan),
                folder,
                share=self.share,
                checksum=how.checksum,
                on_bytes=_unheard if uploads else how.on_bytes,
                on_file=uploads.take if uploads else _not_moved,
                on_lost=self._tell_lost,
                journal=journal,
            )
            if problems := _unusable(report, strict=how.strict):
                raise ReshardError(problems)
            sizes[RECORD] = write_record(plan, folder, report, self.facts, journal)
            report.nbytes += sizes[RECORD]
            if uploads:
                uploads.finish()
            else:
                how.on_bytes(sizes[RECORD])
            if how.verify:
                _read_back(plan, self.target if uploads else folder, report.digests, self.share.threads)
            if how.overwrite and not uploads and (problems := _in_the_way(plan, self.target, overwrite=True)):
                raise ReshardError(problems)  # hours may have passed
        return report

    def _passed(self) -> Passed | None:
        """The CRC32s of what was read, to which the ledger of an open journal's run adds; None without checksums."""
        return self.journal.progress.passed if self.how.checksum else None

    def _tell_lost(self, nbytes: int) -> None:
        note = f"{size(nbytes)} of them changed on the disk since they were written, and are written again"
        done = self.journal.progress
        self.how.on_resume(note, done.uploaded if isinstance(self.target, StorePath) else done.nbytes)

    @contextmanager
    def _stage(self, sizes: Mapping[str, int]) -> Iterator[tuple[Path, Uploads | None]]:
        """The folder in which the output is assembled, and the uploader if the destination is in a store."""
        how, target = self.how, self.target
        if not isinstance(target, StorePath):
            with staged(
                target,
                sizes,
                overwrite=how.overwrite,
                journal=self.journal,
                on_resume=how.on_resume,
                keeps=lambda: _keeps(target),
                single=self.single,
            ) as folder:
                yield folder, None
            return
        bucket = Bucket(target)
        with uploading(
            bucket,
            sizes,
            last=_last(self.plan),
            old=[name for name in bucket.listing() if not stays(name)] if how.overwrite else [],
            keeps=stays,
            memory=self.part,
            journal=self.journal,
            on_bytes=how.on_bytes,
            on_resume=how.on_resume,
        ) as uploads:
            yield uploads.folder, uploads


def _last(plan: Plan) -> list[str]:
    """Files to upload last, in this order: those without tensors, which make the others a checkpoint, then the record.

    In a plan, the format's own files (index, tracker, metadata) come before config and tokenizer; they are uploaded
    after them.
    """
    names = [file.path for file in plan.files if file.path != RECORD and not any(True for _ in file.blocks)]
    return [*reversed(names), RECORD]


def _unheard(count: int) -> None:
    """Ignore written bytes: the progress of an upload counts uploaded ones."""


def _not_moved(name: str, stopped: Event) -> None:
    """Leave a finished file in place: a local folder is renamed as a whole."""


def _read_back(plan: Plan, folder: Path, digests: Mapping[str, str], workers: int) -> None:
    """Raise ReshardError naming each file for which the disk returns different bytes from those written."""
    found = digests_of(folder, list(digests), workers)
    if wrong := [name for name, digest in digests.items() if found[name] != digest]:
        raise ReshardError(
            Problem(
                "output-bytes-differ",
                "the disk returns different bytes from those written",
                file=str(folder / name),
                rule="the output is read back and compared (--verify)",
                remedy="the disk, its controller or the memory is faulty: write to another disk",
            )
            for name in wrong
        )


def _check_before_upload(folder: Path, workers: int) -> None:
    """Raise ReshardError naming each file of an output that has changed since it was written."""
    if faults := check_record(folder, workers).faults:
        raise ReshardError(
            Problem(
                "upload-changed-before",
                "a file has changed since it was written, and is not uploaded",
                file=str(folder / fault.file),
                rule="an output that is already complete is compared with its reshard.json before it is uploaded",
                found=fault.message,
                remedy="convert again, with --overwrite",
            )
            for fault in faults
        )


def _here() -> str:
    """The current directory; empty if it was removed."""
    try:
        return str(Path.cwd())
    except OSError:
        return ""


def check_destination(
    plan: Plan, target: Path, threads: int | None = 1, *, overwrite: bool = False, dry_run: bool = False
) -> list[Problem]:
    """Raise ReshardError with every reason why the output cannot be written to `target`, and return warnings.

    `threads` is how many files are written and uploaded at once if the target is in a store, or None if other machines
    write. A full disk is only a warning in a dry run, because space may be freed later. Any other run first cleans up
    what killed runs left next to `target`.
    """
    if isinstance(target, StorePath):
        return _check_bucket(plan, target, threads, overwrite=overwrite, dry_run=dry_run)
    if not dry_run:
        recover(target)
    problems = _in_the_way(plan, target, overwrite)
    too_small = space_problems(target, plan.nbytes - reusable(target))
    problems += [] if dry_run else too_small
    if problems:
        raise ReshardError(problems)
    return [replace(problem, severity="warning") for problem in too_small] + _kept(target)


def _check_bucket(
    plan: Plan, target: StorePath, threads: int | None, *, overwrite: bool, dry_run: bool
) -> list[Problem]:
    """`check_destination` for a destination in a store."""
    bucket = Bucket(target)
    left = marker_in(bucket)
    names = sorted(bucket.listing().keys() - (left.names if left else set()))
    foreign = (
        [name for name in foreign_among(names, target) if not stays(name)] if overwrite and names else None
    )
    problems = bucket_problems(plan.sources.paths, bucket.url, names, foreign=foreign)
    sizes = {file.path: file.size for file in plan.files}
    needed = upload_memory(sizes, _last(plan), len(sizes) if threads is None else threads)
    place = staging_folder(bucket)
    too_small = space_problems(place, needed - reusable(place))
    problems += [] if dry_run else too_small
    if problems:
        raise ReshardError(problems)
    return [replace(problem, severity="warning") for problem in too_small]


def _in_the_way(plan: Plan, target: Path, overwrite: bool) -> list[Problem]:
    single = bool(plan.suffix) and target.suffix == plan.suffix
    foreign = _foreign_in(target) if overwrite and (target.is_dir() or (single and target.exists())) else None
    return target_problems(plan.sources.paths, target, foreign=foreign, single=single)


def _foreign_in(target: Path) -> list[str]:
    """Files at a destination that `--overwrite` neither replaces nor keeps."""
    if target.is_file():
        return [] if is_checkpoint(target) else [target.name]
    return [name for name in foreign_in(target) if not stays(name)]


def _keeps(target: Path) -> list[str]:
    """Files at a destination that `--overwrite` keeps, unless the output has files of these names."""
    return [name for name in foreign_in(target) if stays(name)] if target.is_dir() else []


def _kept(target: Path) -> list[Problem]:
    """Warn about folders that a killed run moved aside, if something else has taken their place."""
    return [
        Problem(
            "previous-contents-left",
            "a killed run left the previous contents of the destination here",
            file=str(path),
            remedy="remove it if you no longer need it",
            severity="warning",
        )
        for path in move_aside(target)
    ]


def _unusable(report: RunTotals, *, strict: bool) -> list[Problem]:
    """Values that the conversion would lose, and if `strict`, tensors that contain NaN or Inf in the source."""
    lost = report.overflows()
    problems = [overflow_problem(name, lost[name]) for name in sorted(lost)]
    return problems + [_nonfinite(name) for name in report.nonfinite if strict and name not in lost]


def _nonfinite(name: str) -> Problem:
    return Problem(
        "tensor-not-finite",
        "a tensor contains NaN or Inf",
        tensor=name,
        rule="weights are finite (--strict)",
        remedy="use an earlier iteration, or leave out --strict to convert it anyway",
    )
