"""Where the output of a conversion appears, complete or not at all: a folder or file on a disk, or a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event

from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.commands.options import RunOptions
from reshard.folders.companion_names import RECORD
from reshard.formats import named_by
from reshard.records.checkpoint_files import foreign_among, foreign_in, is_checkpoint, stays
from reshard.stores import StorePath
from reshard.stores.bucket import Bucket
from reshard.transfer.destination import bucket_problems, space_problems, target_problems
from reshard.transfer.journal import Journal
from reshard.transfer.leftovers import recover, reusable
from reshard.transfer.plan import Plan
from reshard.transfer.run_files import move_aside
from reshard.transfer.staging import OnResume, staged
from reshard.transfer.unfinished_marker import marker_in
from reshard.transfer.uploading import staging_folder, upload_memory, uploading


@dataclass(frozen=True)
class Stage:
    """The folder in which an output is assembled, and the `sizes` that its files must have in the end.

    `on_resume` is that of the run; `on_bytes` and `on_file` are those of `execute`. `finish` is called once all files
    are written; they are then in `home`, where they can be read back.
    """

    folder: Path
    home: Path
    sizes: dict[str, int]
    on_resume: OnResume
    on_bytes: Callable[[int], None] = lambda count: None
    on_file: Callable[[str, Event], None] = lambda name, stopped: None
    finish: Callable[[], None] = lambda: None


class FolderDestination:
    """A folder on a disk, or a file. The output is written beside it and then renamed."""

    def __init__(self, target: Path, how: RunOptions) -> None:
        self._target, self._how = target, how

    def early_problems(self, source: Path) -> list[Problem]:
        """Problems that can be found without a plan."""
        if self._how.overwrite or isinstance(source, StorePath):
            return []
        single = named_by(self._target) is not None
        return target_problems([source], self._target, foreign=None, single=single)

    def check(self, plan: Plan, threads: int) -> list[Problem]:
        """Raise ReshardError with every reason why the output cannot be written, and return warnings.

        Any run but a dry one first cleans up what killed runs left next to the destination.
        """
        if not self._how.dry_run:
            recover(self._target)
        too_small = space_problems(self._target, plan.nbytes - reusable(self._target))
        return _warnings(self._problems(plan), too_small, self._how) + _left_aside(self._target)

    def _problems(self, plan: Plan) -> list[Problem]:
        target = self._target
        single = bool(plan.suffix) and target.suffix == plan.suffix
        replaces = self._how.overwrite and (target.is_dir() or (single and target.exists()))
        foreign = self._foreign() if replaces else None
        return target_problems(plan.sources.paths, target, foreign=foreign, single=single)

    def _foreign(self) -> list[str]:
        """Files that `--overwrite` neither replaces nor keeps."""
        if self._target.is_file():
            return [] if is_checkpoint(self._target) else [self._target.name]
        return [name for name in foreign_in(self._target) if not stays(name)]

    def _kept(self) -> list[str]:
        """Files that `--overwrite` keeps, unless the output has files of these names."""
        return [name for name in foreign_in(self._target) if stays(name)] if self._target.is_dir() else []

    def upload_memory(self, left: int) -> int:
        """How many of the `left` bytes of memory uploads take."""
        return 0

    @contextmanager
    def stage(self, plan: Plan, single: str | None, journal: Journal, memory: int) -> Iterator[Stage]:
        """A stage whose files, or only the file `single`, are at the destination when the block has ended."""
        sizes = {file.path: file.size for file in plan.files}
        with staged(
            self._target,
            sizes,
            overwrite=self._how.overwrite,
            journal=journal,
            on_resume=self._how.on_resume,
            keeps=self._kept,
            single=single,
        ) as folder:
            yield Stage(folder, folder, sizes, self._how.on_resume, self._how.on_bytes)
            if self._how.overwrite and (problems := self._problems(plan)):
                raise ReshardError(problems)  # hours may have passed


class BucketDestination:
    """A folder in a store. Each file is uploaded once it is complete; until all are, a marker says so."""

    def __init__(self, target: StorePath, how: RunOptions) -> None:
        self._target, self._how = target, how

    def early_problems(self, source: Path) -> list[Problem]:
        """Problems that can be found without a plan."""
        return []

    def check(self, plan: Plan, threads: int) -> list[Problem]:
        """Raise ReshardError with every reason why the output cannot be written, and return warnings.

        `threads` is how many files are written and uploaded at once; other machines write any number.
        """
        bucket = Bucket(self._target)
        left = marker_in(bucket)
        names = sorted(bucket.listing().keys() - (left.names if left else set()))
        foreign = None
        if self._how.overwrite and names:
            foreign = [name for name in foreign_among(names, self._target) if not stays(name)]
        problems = bucket_problems(plan.sources.paths, bucket.url, names, foreign=foreign)
        sizes = {file.path: file.size for file in plan.files}
        needed = upload_memory(sizes, _last(plan), threads if self._how.on is None else len(sizes))
        folder = staging_folder(bucket)
        return _warnings(problems, space_problems(folder, needed - reusable(folder)), self._how)

    def upload_memory(self, left: int) -> int:
        """How many of the `left` bytes of memory uploads take."""
        return left // 3

    @contextmanager
    def stage(self, plan: Plan, single: str | None, journal: Journal, memory: int) -> Iterator[Stage]:
        """A stage whose files are at the destination when the block has ended. Each upload takes `memory` bytes."""
        bucket, sizes = Bucket(self._target), {file.path: file.size for file in plan.files}

        def on_resume(note: str, done: int) -> None:
            self._how.on_resume(note, done and journal.progress.uploaded)

        with uploading(
            bucket,
            sizes,
            last=_last(plan),
            old=[name for name in bucket.listing() if not stays(name)] if self._how.overwrite else [],
            keeps=stays,
            memory=memory,
            journal=journal,
            on_bytes=self._how.on_bytes,  # the progress counts uploaded bytes, not written ones
            on_resume=on_resume,
        ) as uploads:
            yield Stage(
                uploads.folder, self._target, sizes, on_resume, on_file=uploads.take, finish=uploads.finish
            )


def destination_at(target: Path, how: RunOptions) -> FolderDestination | BucketDestination:
    """The destination of a run."""
    return BucketDestination(target, how) if isinstance(target, StorePath) else FolderDestination(target, how)


def single_file(plan: Plan, target: Path, how: RunOptions) -> str | None:
    """The only file of a plan, if the destination has the name of one. Raises ReshardError if it cannot be one."""
    if not plan.suffix or target.suffix != plan.suffix or target.is_dir():
        return None
    files = [file.path for file in plan.files if file.path != RECORD]
    obstacles = {
        "a destination in a store": isinstance(target, StorePath),
        "--push-to-hub": how.push is not None,
        f"{len(files)} files": len(files) > 1,
    }
    if any(obstacles.values()):
        raise ReshardError(
            "destination-must-be-folder",
            "this output cannot be a single file",
            file=str(target),
            found=", ".join(obstacle for obstacle, is_there in obstacles.items() if is_there),
            remedy=f"choose a folder, such as {target.with_suffix('')}"
            + ("; or a larger --max-shard-size" if len(files) > 1 else ""),
        )
    return files[0]


def _warnings(problems: list[Problem], too_small: list[Problem], how: RunOptions) -> list[Problem]:
    """Raise ReshardError for problems. A full disk is only a warning in a dry run: space may be freed later."""
    raise_all(problems + ([] if how.dry_run else too_small))
    return [replace(problem, severity="warning") for problem in too_small]


def _left_aside(target: Path) -> list[Problem]:
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


def _last(plan: Plan) -> list[str]:
    """Files to upload last, in this order: those without tensors, which make the others a checkpoint, then the record.

    In a plan, the format's own files (index, tracker, metadata) come before config and tokenizer; they are uploaded
    after them.
    """
    names = [file.path for file in plan.files if file.path != RECORD and not any(True for _ in file.blocks)]
    return [*reversed(names), RECORD]
