"""What is written of an output file, and what its bytes have shown: the one record that a run keeps of each file.

A thread adds its batches to it, a worker on another machine sends it, the journal stores it, and a later run continues
from it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from reshard.transfer.digests import runs
from reshard.transfer.elements import Overflow

MAX_BATCHES = 1 << 22
"""Most batches of a file that a journal may name: a damaged number must not fill the memory."""


class BegunBlock(NamedTuple):
    """A large block of which bytes `begin` to `end` of its file are written, and what they have shown."""

    begin: int
    end: int
    checksum: int
    nonfinite: bool
    overflow: Overflow | None = None

    @staticmethod
    def of_entry(entry: Sequence[Any]) -> BegunBlock:
        """The block that a journal describes. Raises one of `UNUSABLE` if the entry is malformed."""
        begin, end, checksum, nonfinite, overflow = entry
        return BegunBlock(
            int(begin), int(end), checksum, nonfinite, Overflow(*overflow) if overflow else None
        )


class FileState(NamedTuple):
    """What a file system says of a file, with times in nanoseconds. Any write changes it: no program can set `changed`.

    `boot` is the boot of the machine, or "" where that is unknown: a crash can lose bytes, and other machines may see
    other times.
    """

    modified: int
    changed: int
    inode: int
    boot: str

    @staticmethod
    def of(status: os.stat_result) -> FileState:
        """The state that `status` shows."""
        return FileState(status.st_mtime_ns, status.st_ctime_ns, status.st_ino, _boot())


@cache
def _boot() -> str:
    """An identifier of the machine's boot; "" on systems other than Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass
class WrittenFile:
    """What is on disk of one output file. Batches are identified by their numbers.

    Attributes
    ----------
    finished : int
        Bytes of the finished batches, or of all once the file is complete.
    batches : set of int
        Finished batches; none once the file is complete.
    begun : dict of int to BegunBlock
        Large blocks that are written in part, by the numbers of their batches.
    late : list of (int, bytes)
        Checksums to write after everything else, with their offsets.
    nonfinite : set of str
        Tensors that contain NaN or Inf.
    overflowed : dict of (str, int) to Overflow
        Finite values that a cast made infinite, by tensor and offset of the block.
    state : FileState or None
        State of the file when this was recorded.
    digest : str
        Digest of a complete file.
    elsewhere : str or None
        State of a complete file that was uploaded, and is no longer in the folder.
    """

    finished: int = 0
    batches: set[int] = field(default_factory=set)
    begun: dict[int, BegunBlock] = field(default_factory=dict)
    late: list[tuple[int, bytes]] = field(default_factory=list)
    nonfinite: set[str] = field(default_factory=set)
    overflowed: dict[tuple[str, int], Overflow] = field(default_factory=dict)
    state: FileState | None = None
    digest: str = ""
    elsewhere: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        return self.finished + sum(each.end - each.begin for each in self.begun.values())

    @property
    def is_whole(self) -> bool:
        """Whether the file is complete."""
        return bool(self.digest)

    def is_at(self, path: Path, size: int) -> bool:
        """Whether a file of this size is at `path`, unmodified if it was complete."""
        try:
            status = path.lstat()
        except OSError:
            return False
        is_same = not self.is_whole or (self.state and self.state.modified == status.st_mtime_ns)
        return status.st_size == size and bool(is_same)

    def is_still(self, path: Path) -> bool:
        """Whether nobody has written the file at `path` since this was recorded, and the machine has not restarted."""
        return self.state is not None and bool(self.state.boot) and FileState.of(path.lstat()) == self.state

    def add(self, more: WrittenFile) -> None:
        """Add batches that are finished, and blocks that are begun, according to `more`."""
        self.finished += more.finished
        self.batches |= more.batches
        self.begun = {n: each for n, each in {**self.begun, **more.begun}.items() if n not in self.batches}
        self.late += more.late
        self.nonfinite |= more.nonfinite
        self.overflowed |= more.overflowed

    def as_entry(self) -> dict[str, Any]:
        """The record as JSON stores it."""
        return {
            "finished": self.finished,
            "batches": list(runs(self.batches)),
            "begun": dict(self.begun),
            "late": [(place, checksum.hex()) for place, checksum in self.late],
            "nonfinite": sorted(self.nonfinite),
            "overflowed": [[*place, *overflow] for place, overflow in self.overflowed.items()],
            "state": self.state,
            "digest": self.digest,
            "elsewhere": self.elsewhere,
        }

    @staticmethod
    def of_entry(entry: Mapping[str, Any]) -> WrittenFile:
        """The record that `as_entry` returned. Raises one of `UNUSABLE` if it is malformed."""
        if any(end > MAX_BATCHES for _, end in entry["batches"]):
            raise ValueError(f"batches {entry['batches']}")
        return WrittenFile(
            int(entry["finished"]),
            {number for first, end in entry["batches"] for number in range(first, end)},
            {int(number): BegunBlock.of_entry(begun) for number, begun in entry["begun"].items()},
            [(int(place), bytes.fromhex(checksum)) for place, checksum in entry["late"]],
            set(entry["nonfinite"]),
            {(name, offset): Overflow(*overflow) for name, offset, *overflow in entry["overflowed"]},
            FileState(*entry["state"]) if entry["state"] else None,
            entry["digest"],
            entry["elsewhere"],
        )
