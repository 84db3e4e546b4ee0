"""The state of a run: what its threads share, and what is left of it when they have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from threading import Lock

from reshard.algebra.storage import Storage
from reshard.algebra.tensors import cells_of
from reshard.transfer.batch import BlockState
from reshard.transfer.digests import FileDigest
from reshard.transfer.gather import check_sums
from reshard.transfer.journal import FLUSH_BYTES, Journal
from reshard.transfer.ledger import Ledger, Passed
from reshard.transfer.memory_budget import ThreadShare
from reshard.transfer.overflow import Overflow, total
from reshard.transfer.plan import Plan
from reshard.transfer.resumed_output import check_kept
from reshard.transfer.shared_windows import Windows
from reshard.transfer.sink import stays_cached

AT_RISK_DIVISOR = 16
"""All threads together lose at most 1/AT_RISK_DIVISOR of an output when the run is killed.

That is, if it is at least `MIN_FLUSH_BYTES` for each of them.
"""

MIN_FLUSH_BYTES = 16 << 20
"""Bytes of a file that are not worth a wait for the disk."""


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
        blocks = (each for found in self.overflowed.values() for each in found.items())
        return total((name, overflow) for (name, _), overflow in blocks)


class RunState:
    """The state of a run that writes `plan` to `folder`.

    `journal` records what is on disk, `ledger` has the CRC32s of what was read (None without checksums), `report` the
    totals. `digests` are those of unfinished files of an earlier run, by path.
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
        self.every = min(FLUSH_BYTES, max(MIN_FLUSH_BYTES, size // AT_RISK_DIVISOR // share.threads))
        """Bytes of a file after which the progress is recorded."""
        before = journal.progress
        self.report = RunTotals(before.nbytes, before.nbytes, sorted(before.nonfinite))
        self.report.digests = {path: each.digest for path, each in before.files.items() if each.is_whole}
        self.report.overflowed = {p: dict(each.overflowed) for p, each in before.files.items()}
        self._on_bytes = on_bytes
        self._names = dict(before.unchecked)
        self._unchecked = set(before.unchecked)
        self.touch(before.unchecked)

    @property
    def names(self) -> Mapping[Storage, str]:
        """A tensor in each storage that was read."""
        return self._names

    def name(self, names: Mapping[Storage, str]) -> None:
        """Add the names of tensors in storages that other processes have read."""
        with self.lock:
            self._names = {**names, **self._names}

    def note(self, stream: BlockState) -> list[Storage]:
        """Record what a finished block showed; return the storages that it was read from, if they have checksums."""
        name = stream.block.name
        storages = [cells.storage for cells in cells_of(stream.view)]
        with self.lock:
            if stream.nonfinite and name not in self.report.nonfinite:
                self.report.nonfinite.append(name)
            for storage in storages:
                self._names.setdefault(storage, name)
        return [storage for storage in storages if storage.crc32 is not None]

    def touch(self, storages: Iterable[Storage]) -> None:
        """Have storages checked in full at the end, because an earlier run has read parts of them."""
        if self.ledger:
            for storage in storages:
                self.ledger.touch(storage)

    def checks(self, taken: set[Storage]) -> tuple[dict[Storage, str], list[Storage]]:
        """Checksums for the journal to record once a file contains data from the storages `taken`.

        Returns the storages that are yet to be checked, each with the name of a tensor in it, and those that were
        checked.
        """
        if self.ledger is None or not self.journal.is_open:
            return {}, []
        with self.lock:
            later = [each for each in taken - self._unchecked if not self.ledger.is_right(each)]
            checked = [each for each in self._unchecked if self.ledger.is_right(each)]
            return {each: self._names.get(each, "") for each in later}, checked

    def note_checks(self, later: Iterable[Storage], checked: Iterable[Storage]) -> None:
        """Remember that the journal has recorded these checksums."""
        with self.lock:
            self._unchecked.update(later)
            self._unchecked.difference_update(checked)

    def advance(self, nbytes: int) -> None:
        """Count bytes that were written."""
        with self.lock:
            self.report.nbytes += nbytes
        self._on_bytes(nbytes)

    def settle(self) -> RunTotals:
        """Compare all checksums. Returns the report; raises ReshardError with every damaged tensor."""
        self.report.nonfinite.sort()
        if self.ledger is None:
            return self.report
        check_sums(self.ledger, self._names)
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
    _make_folders(plan, folder)
    kept = check_kept(plan, folder, journal, share.threads)
    if kept.lost:
        on_lost(kept.lost)
    ledger = Ledger(every=True, passed=journal.progress.passed, most=share.ranges) if checksum else None
    return RunState(plan, folder, share, ledger, journal, on_bytes, kept.digests)


def _make_folders(plan: Plan, folder: Path) -> None:
    """Create the folders of all files of `plan` in `folder`."""
    parents = {parent for file in plan.files for parent in PurePosixPath(file.path).parents}
    for parent in sorted(parents - {PurePosixPath()}):
        # Never create `folder` itself: if someone removed it, no part of it must reappear.
        (folder / parent).mkdir(exist_ok=True)
