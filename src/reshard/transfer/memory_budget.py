"""The memory of a run: the plan comes first, and threads divide what is left of `--memory`.

Every array that grows with a tensor is one of: the window of a file (`batch`), what a `Gatherer` reads to pick from,
and the memory that a `Computed` declares (`memory_for`). Each has its part of a thread's share, so their sum is less
than the limit. The memory of a plan is measured, since it consists of Python objects.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from reshard.algebra.tensors import Computed, Tensor
from reshard.base.errors import ReshardError
from reshard.stores import CONNECTIONS, MAX_REQUEST_BYTES, is_remote
from reshard.transfer import ledger

WINDOW_BYTES = 4 << 20
"""Bytes written at a time: small enough for the cache, large enough for the disk."""

WIDE_WINDOW_BYTES = 32 << 20
"""The same for transposed tensors, so that one read of the source serves many rows."""

MIN_MEMORY_BYTES = 2 << 20
"""Least memory of a `Gatherer` in bytes, without what computing takes: reads of a few kilobytes would be too slow."""

BYTES_BESIDES = 1 << 20
"""Bytes of a thread in addition to its window and what it gathers: cells without digest, checksums, entries."""

USUAL_THREADS = 8
"""Most threads by default."""

USUAL_BYTES_PER_THREAD = 24 << 20
"""Bytes per thread below which fewer threads are faster."""

MAX_BYTES_PER_THREAD = 96 << 20
"""Bytes per thread above which nothing is faster."""

SHARED_WINDOW_BYTES = 128 << 20
"""Most bytes of files in stores that are kept because other threads need them, too."""

LEDGER_BYTES = 64 << 20
"""Most bytes for the CRC32s of ranges that are not joined yet: those of Llama-3.1-405B at TP8 take 42 MiB."""

LEAST_LEDGER = 1 << 20
"""The least bytes for them."""

SLACK_BYTES = 8 << 20
"""Most bytes by which two runs of the same plan differ, so that what one asks for is enough for the next."""

LEAST_SLACK = 256 << 10
"""The least bytes for that: two runs of a small plan differ by a fifth of it."""


class MemoryNeed(NamedTuple):
    """The bytes without which a tensor cannot be computed, and its name. Tensors that are only read need none."""

    nbytes: int = 0
    tensor: str | None = None

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> MemoryNeed:
        """The largest need of some tensors."""
        return most(
            MemoryNeed(piece.source.least_memory, name)
            for name, tensor in tensors.items()
            for piece in tensor.view.pieces
            if isinstance(piece.source, Computed)
        )

    def plus(self, other: MemoryNeed) -> MemoryNeed:
        """What both need at the same time."""
        return MemoryNeed(self.nbytes + other.nbytes, other.tensor or self.tensor)


def most(needs: Iterable[MemoryNeed]) -> MemoryNeed:
    """The largest of some needs."""
    return max((need for need in needs if need.nbytes), default=MemoryNeed())


NO_NEED = MemoryNeed()


class ThreadShare(NamedTuple):
    """The number of threads, and the bytes that each may use, of which computing an element takes up to `need`.

    All threads together keep the CRC32s of at most `ranges` ranges that they read, and `windows` bytes of stores that
    several of them need.
    """

    threads: int
    each: int
    need: int = 0
    ranges: int = LEDGER_BYTES // ledger.BYTES_PER_RANGE
    windows: int = 0

    @property
    def wide(self) -> int:
        """Bytes of a window of a transposed tensor."""
        return max(
            WINDOW_BYTES,
            min(WIDE_WINDOW_BYTES, self.each // 3, self.each - self.need - MIN_MEMORY_BYTES - BYTES_BESIDES),
        )

    @property
    def gathering(self) -> int:
        """Bytes for data that is read to pick from, and for computed values."""
        return self.each - self.wide - BYTES_BESIDES


def shared(
    workers: int | None, memory: int, need: MemoryNeed = NO_NEED, paths: Iterable[Path | str] = ()
) -> ThreadShare:
    """Divide `memory` bytes among `workers` threads.

    By default there are two threads per core, at most `USUAL_THREADS`: one gathers while another waits for the disk. If
    any of the `paths` that are read is in a store, there is one thread per connection, and room for the data received.
    There are fewer if each would get little memory, but always one, whatever it takes: see `MemoryMeter.left`.
    """
    noted = max(LEAST_LEDGER, min(LEDGER_BYTES, memory // 16))
    memory -= noted
    wanted, windows = workers or min(USUAL_THREADS, 2 * (os.cpu_count() or 1)), 0
    if any(map(is_remote, paths)):
        wanted, windows = workers or CONNECTIONS, min(memory // 8, SHARED_WINDOW_BYTES)
        memory -= windows + min(memory // 2, CONNECTIONS * MAX_REQUEST_BYTES)
    least = _least(need)
    threads = max(1, min(wanted, memory // max(least, USUAL_BYTES_PER_THREAD)))
    return ThreadShare(
        threads,
        max(least, min(MAX_BYTES_PER_THREAD, memory // threads)),
        need.nbytes,
        noted // ledger.BYTES_PER_RANGE,
        windows,
    )


def _least(need: MemoryNeed) -> int:
    """The least bytes of one thread."""
    return WINDOW_BYTES + BYTES_BESIDES + MIN_MEMORY_BYTES + need.nbytes


class MemoryMeter:
    """The memory that the process takes from now on, of at most `memory` bytes."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._aside = 0
        self._now, self._peak = resident()

    def left(self, need: MemoryNeed) -> int:
        """The bytes left for executing the plan that was made.

        Raises ReshardError with a sufficient number if too few are left.
        """
        now, peak = resident()
        used = max(0, now - self._now)
        planning = max(used, peak - self._now if peak > self._peak else 0)
        enough = max(planning, used + _least(need) + LEAST_LEDGER) + self._aside
        if enough <= self._memory:
            return self._memory - used - self._aside
        raise self._too_little(
            enough,
            planning,
            f"the plan takes {_mebibytes(planning)}, one thread {_mebibytes(_least(need) + LEAST_LEDGER)}",
            tensor=need.tensor,
        )

    def fits(self, nbytes: int) -> bool:
        """Whether `nbytes` more bytes fit in what is left. Few always do, without measuring."""
        return nbytes < SLACK_BYTES or self._enough(nbytes) <= self._memory

    def _enough(self, nbytes: int) -> int:
        return max(0, resident()[0] - self._now) + self._aside + nbytes

    def set_aside(self, nbytes: int, path: str) -> None:
        """Keep bytes for what a package allocates during the run. Raises ReshardError if too few are left."""
        self.expect(nbytes, path)
        self._aside = max(self._aside, nbytes)

    def expect(self, nbytes: int, path: str) -> None:
        """Raise ReshardError if reading a file, and what is made from it, takes more than is left."""
        if not self.fits(nbytes):
            enough = self._enough(nbytes)
            raise self._too_little(enough, enough, f"reading this takes {_mebibytes(nbytes)}", file=path)

    def _too_little(self, enough: int, measured: int, needs: str, **where: str | None) -> ReshardError:
        """The error that names what is enough. Only what was `measured` of it may differ in the next run."""
        number = _mebibytes(enough + min(SLACK_BYTES, LEAST_SLACK + measured // 8))
        return ReshardError(
            "memory-too-small",
            "the memory limit is too low",
            rule="--memory limits everything besides Python and its libraries: the plan and the threads",
            expected=f"--memory {number} or more",
            found=f"--memory {_mebibytes(self._memory)}; {needs}",
            remedy=f"pass --memory {number}",
            **where,
        )


def _mebibytes(nbytes: int) -> str:
    return f"{-(-nbytes >> 20)}MiB"


def resident() -> tuple[int, int]:
    """Resident bytes of the process now, and their peak. If the system reports only the peak, it is both."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        sizes = dict(line.split(":", 1) for line in lines if line.startswith(("VmRSS", "VmHWM")))
        return int(sizes["VmRSS"].split()[0]) << 10, int(sizes["VmHWM"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = peak if sys.platform == "darwin" else peak << 10
        return peak, peak
