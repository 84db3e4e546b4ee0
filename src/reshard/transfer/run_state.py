"""The state of a run: what its threads share, and what is left of it when they have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from threading import Lock

from reshard.algebra.storage import Storage
from reshard.algebra.tensors import cells_of
from reshard.base.errors import Problem
from reshard.transfer.batch import BlockState
from reshard.transfer.digests import FileDigest, PartDigests
from reshard.transfer.elements import Overflow, overflow_problem, total
from reshard.transfer.gather import check_sums
from reshard.transfer.journal import FLUSH_BYTES, Journal, as_entry
from reshard.transfer.ledger import Ledger, Passed, join
from reshard.transfer.memory_budget import ThreadShare
from reshard.transfer.plan import Plan
from reshard.transfer.resumed_output import check_kept
from reshard.transfer.shared_windows import Windows
from reshard.transfer.sink import stays_cached
from reshard.transfer.written_file import WrittenFile

AT_RISK_DIVISOR = 16
"""All threads together lose at most 1/AT_RISK_DIVISOR of an output when the run is killed, and the windows in work."""

MIN_FLUSH_BYTES = 16 << 20
"""Bytes of a file that are not worth a wait for the disk. Only a machine that fails loses what the system has."""


@dataclass
class SourceReads:
    """What was read of the sources: storages with a checksum, and the ranges that nobody had read before."""

    storages: set[Storage] = field(default_factory=set)
    ranges: Passed = field(default_factory=dict)

    def add(self, more: SourceReads) -> None:
        """Add what was read for other batches."""
        self.storages |= more.storages
        join(self.ranges, more.ranges)


@dataclass
class RunTotals:
    """Totals: bytes of the output, bytes that an earlier run had written, tensors that contain NaN or Inf.

    `digests` maps the path of each file to its digest. `passed` are the ranges of each source that were read, with
    their CRC32s; None without checksums. `overflowed` are the finite values that a cast made infinite: for each file,
    by tensor and offset of the block.
    """

    nbytes: int = 0
    resumed: int = 0
    nonfinite: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    passed: Passed | None = None
    overflowed: dict[str, dict[tuple[str, int], Overflow]] = field(default_factory=dict)

    def overflows(self) -> dict[str, Overflow]:
        """The finite values that a cast made infinite, by tensor."""
        blocks = (each for of_file in self.overflowed.values() for each in of_file.items())
        return total((name, overflow) for (name, _), overflow in blocks)

    def problems(self, *, strict: bool) -> list[Problem]:
        """Values that the output has lost, and if `strict`, tensors that contain NaN or Inf in the source."""
        lost = self.overflows()
        problems = [overflow_problem(name, lost[name]) for name in sorted(lost)]
        return problems + [
            Problem(
                "tensor-not-finite",
                "a tensor contains NaN or Inf",
                tensor=name,
                rule="weights are finite (--strict)",
                remedy="use an earlier iteration, or leave out --strict to convert it anyway",
            )
            for name in self.nonfinite
            if strict and name not in lost
        ]


class RunState:
    """The state of a run that writes `plan` to `folder`.

    `journal` records what is on disk, and `files` is what is written of each file. `ledger` has the CRC32s of what was
    read (None without checksums), `report` the totals. `digests` are those of unfinished files of an earlier run, by
    path.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        share: ThreadShare,
        ledger: Ledger | None,
        journal: Journal,
        on_bytes: Callable[[int], None],
        digests: Mapping[str, FileDigest] | None = None,
    ) -> None:
        self.plan, self.folder, self.share = plan, folder, share
        self.ledger, self.journal = ledger, journal
        self.digests = dict(digests or {})
        self.lock = Lock()
        self.windows = Windows(share.windows) if share.windows else None
        size = sum(file.size for file in plan.files)
        self.direct = not stays_cached(size)
        self.every = min(FLUSH_BYTES, size // AT_RISK_DIVISOR // share.threads)
        """Bytes of a file after which its progress is recorded."""
        self.flush_every = min(FLUSH_BYTES, max(MIN_FLUSH_BYTES, self.every))
        """Bytes of a file after which they are flushed to disk, too."""
        before = journal.progress
        self.files = dict(before.files)
        self.report = RunTotals(before.nbytes, before.nbytes)
        self._on_bytes = on_bytes
        self.names: dict[Storage, str] = dict(before.unchecked)
        """A tensor in each storage that was read."""
        self.touch(before.unchecked)

    def name(self, names: Mapping[Storage, str]) -> None:
        """Add the names of tensors in storages that other processes have read."""
        with self.lock:
            self.names = {**names, **self.names}

    def name_storages(self, stream: BlockState) -> list[Storage]:
        """Name the storages that a block was read from after its tensor; returns those with checksums."""
        storages = [cells.storage for cells in cells_of(stream.view)]
        with self.lock:
            for storage in storages:
                self.names.setdefault(storage, stream.block.name)
        return [storage for storage in storages if storage.crc32 is not None]

    def touch(self, storages: Iterable[Storage]) -> None:
        """Have storages checked in full at the end, because an earlier run has read parts of them."""
        if self.ledger:
            for storage in storages:
                self.ledger.touch(storage)

    def record(self, path: str, written: WrittenFile, sums: PartDigests | None, read: SourceReads) -> None:
        """Record in the journal what is on disk of a file, and which storages in it are yet to be checked."""
        ledger, unchecked = self.ledger, dict(self.journal.progress.unchecked)
        later = [each for each in read.storages - unchecked.keys() if ledger and not ledger.is_right(each)]
        self.journal.record(
            path,
            written,
            sums,
            passed=read.ranges,
            unchecked=[[self.names.get(each, ""), *as_entry(each)] for each in later],
            checked=[as_entry(each) for each in unchecked if ledger and ledger.is_right(each)],
        )

    def advance(self, nbytes: int) -> None:
        """Count bytes that were written."""
        with self.lock:
            self.report.nbytes += nbytes
        self._on_bytes(nbytes)

    def settle(self) -> RunTotals:
        """Compare all checksums. Returns the report; raises ReshardError with every damaged tensor."""
        self.report.nonfinite = sorted({name for each in self.files.values() for name in each.nonfinite})
        self.report.digests = {path: each.digest for path, each in self.files.items()}
        self.report.overflowed = {path: each.overflowed for path, each in self.files.items()}
        if self.ledger is None:
            return self.report
        check_sums(self.ledger, self.names)
        self.ledger.complete(self.plan.sources.sizes())
        self.report.passed = self.ledger.passed
        return self.report


def opened(
    plan: Plan,
    folder: Path,
    share: ThreadShare,
    journal: Journal,
    *,
    checksum: bool,
    on_bytes: Callable[[int], None],
    on_lost: Callable[[int], None],
) -> RunState:
    """The state of a run that continues what `journal` records of `folder`.

    Bytes in `folder` that are not as recorded are written again; `on_lost` receives their number.
    """
    parents = {parent for file in plan.files for parent in PurePosixPath(file.path).parents}
    for parent in sorted(parents - {PurePosixPath()}):
        # Never create `folder` itself: if someone removed it, no part of it must reappear.
        (folder / parent).mkdir(exist_ok=True)
    kept = check_kept(plan, folder, journal, share.threads)
    if kept.lost:
        on_lost(kept.lost)
    ledger = Ledger(every=True, passed=journal.progress.passed, most=share.ranges) if checksum else None
    return RunState(plan, folder, share, ledger, journal, on_bytes, kept.digests)
