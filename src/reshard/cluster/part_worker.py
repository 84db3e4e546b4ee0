"""Workers on other machines: each plans the same conversion itself, and writes parts of it."""

from __future__ import annotations

import pickle
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from threading import Event

import numpy as np

from reshard.base.errors import ReshardError, cause_of, type_and_message
from reshard.cluster import slurm_executor
from reshard.cluster.distribute import PARTS, WorkerOrder, spread
from reshard.cluster.plan_parts import execute_part
from reshard.folders.companion_names import RECORD
from reshard.formats.options import ConversionOptions
from reshard.planning import plan_conversion
from reshard.transfer import part_claims
from reshard.transfer.execute import execute
from reshard.transfer.journal import OutputIdentity
from reshard.transfer.memory_budget import USUAL_THREADS, MemoryMeter, shared
from reshard.transfer.plan import Plan
from reshard.transfer.run_state import RunTotals
from reshard.transfer.threads import together
from reshard.version import __version__

Execute = Callable[..., RunTotals]
"""Writes all files of a plan, as `execute` does."""

PROGRAM_PACKAGES = (
    *("algebra", "families", "transfer", "containers", "codecs", "folders", "formats", "model"),
    *("adapters", "planning", "cluster"),
)
"""The packages that determine the bytes of an output."""


def identity_of(
    plan: Plan, options: ConversionOptions, *, checksum: bool, inodes: bool = True
) -> OutputIdentity:
    """Everything that determines the bytes of the output: the program, the sources, the options and the files.

    Without `inodes`, it is the same on all machines: some file systems give a file another inode on each.
    """
    wanted = _at(options, lambda path: path.resolve())
    digest = sha256(
        f"{wanted.meant!r} {checksum} {[path.resolve() for path in plan.sources.named]!r}".encode()
    )
    for file in (each for each in plan.files if each.path != RECORD):
        digest.update(f"\n{file.path!r} {file.size}".encode())
    program = _program_digest(Path(__file__).parents[1])
    return OutputIdentity(program, plan.sources.digest(inodes=inodes), digest.hexdigest())


@cache
def _program_digest(package: Path) -> str:
    """A digest of the code that determines the output: the version alone does not identify a checkout.

    Made once for each process, which goes on with the code that it has loaded.
    """
    digest = sha256(f"{__version__} {np.__version__}".encode())
    for part in PROGRAM_PACKAGES:
        for path in sorted((package / part).rglob("*.*")):  # tables of names, too
            digest.update(b"" if "__pycache__" in path.parts else path.read_bytes())
    return digest.hexdigest()


def absolute(source: Path, options: ConversionOptions) -> tuple[Path, ConversionOptions]:
    """The same paths, absolute, for processes in another folder."""
    extra_files = {name: path.absolute() for name, path in options.beside.items()}
    return source.absolute(), replace(_at(options, lambda path: path.absolute()), beside=extra_files)


def _at(options: ConversionOptions, place: Callable[[Path], Path]) -> ConversionOptions:
    """The options with other paths of what is read."""
    base, complete = options.base_path, options.fill_path
    return replace(options, base=base and place(base), fill_from=complete and place(complete))


@dataclass(frozen=True)
class PartWorker:
    """Writes parts of one conversion, in any process that sees the same files. `workers` is its number of threads."""

    source: Path
    options: ConversionOptions
    identity: OutputIdentity
    checksum: bool
    memory: int
    workers: int | None

    def __call__(self, order: WorkerOrder) -> Exception | None:
        """Write parts until none is left. Returns the error: submitit would pass on its text only."""
        if not order.claims.is_dir():
            return _unseen(order.folder)
        try:
            with part_claims.working(order.claims, order.number) as is_stopped:
                self._work(order, is_stopped)
        except Exception as error:
            known = isinstance(error, (ReshardError, OSError, MemoryError))
            text = "".join(traceback.format_exception(error))
            return error if known else RuntimeError(f"{type_and_message(error)}\n{text}")
        return None

    def _work(self, order: WorkerOrder, is_stopped: Callable[[], bool]) -> None:
        plan, memory = self._plan()
        share = shared(self.workers, memory, plan.need)
        alone = share._replace(threads=1, ranges=share.ranges // share.threads)
        parts = pickle.loads((order.claims / PARTS).read_bytes())
        claims = part_claims.Claims(order.claims, order.number, order.count, len(parts))

        def pull(index: int, stopped: Event) -> None:
            """Take one part after another: while one thread waits for the disk, others compute."""
            while (number := claims.take()) is not None:
                outcome = execute_part(
                    plan,
                    order.folder,
                    parts[number],
                    lambda: stopped.is_set() or is_stopped(),
                    share=alone,
                    checksum=self.checksum,
                )
                part_claims.save(order.claims / f"{number}.done", outcome)

        try:
            together(pull, share.threads)
        except (ReshardError, OSError) as error:
            if problems := plan.sources.changed():
                raise ReshardError(problems) from cause_of(error)
            raise

    def _plan(self) -> tuple[Plan, int]:
        """The same plan as in the main process, and the bytes of memory left for a part of it.

        Raises ReshardError if this process makes another plan.
        """
        meter = MemoryMeter(self.memory)
        try:
            plan = plan_conversion(self.source, self.options)
        except ReshardError as error:
            raise _otherwise(self.source, str(error).replace("\n  ", ", ")) from error.__cause__
        identity = identity_of(plan, self.options, checksum=self.checksum, inodes=False)
        if identity != self.identity:
            raise _otherwise(self.source, identity.differs(self.identity))
        return plan, meter.left(plan.need)


@contextmanager
def executing_on(
    on: str | None,
    source: Path,
    options: ConversionOptions,
    plan: Plan,
    checksum: bool,
    memory: int,
    workers: int | None,
) -> Iterator[Execute]:
    """What executes a plan: `execute`, or with `on` the jobs of Slurm. Raises ReshardError if it does not answer."""
    if on is None:
        yield execute
        return
    identity = identity_of(plan, options, checksum=checksum, inodes=False)
    with slurm_executor.opened(on) as executor:
        worker = PartWorker(source, options, identity, checksum, memory, workers)
        yield partial(spread, executor=executor, perform=worker, pullers=workers or USUAL_THREADS)


def _otherwise(source: Path, found: str) -> ReshardError:
    return ReshardError(
        "worker-plans-differently",
        "a worker sees a different source, or runs a different version",
        file=str(source),
        rule="each worker plans the conversion itself and must get the same plan",
        found=f"on {socket.gethostname()}: {found}",
        remedy="keep the source on a file system that all nodes share, under one path, and install the same versions "
        "of reshard and numpy on them",
    )


def _unseen(folder: Path) -> ReshardError:
    return ReshardError(
        "worker-lacks-output",
        "a worker cannot see the folder that the output is written to",
        file=str(folder.parent),
        rule="all workers write to one folder, next to the destination",
        found=f"it is not there on {socket.gethostname()}",
        remedy="choose a destination on a file system that all nodes share; for one in a store, set TMPDIR to a folder "
        "on such a file system",
    )
