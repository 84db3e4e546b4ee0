"""Digests of files whose bytes arrive in any order.

A file is cut into cells of `CELL` bytes, the last of which may be shorter. The digest of the file is the XXH3-128 of
the concatenated XXH3-128 digests of its cells, each of 16 bytes with the most significant first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Lock

from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from reshard.stores import StorePath, open_file

CELL = 256 << 10
WIDTH = 16
"""Bytes of one digest."""
NAME = "XXH3-128 of the XXH3-128 digests of each 256 KiB"
NONE = "0" * 2 * WIDTH
"""Stands for an unknown digest."""
SPAN = 16 * CELL
"""Bytes read at a time."""


@dataclass
class Seen:
    """What was seen of a file: digests of adjacent cells, with the number of the first, and parts of other cells.

    Each of these `rests` is a range of bytes, with its offset in the file.
    """

    cells: list[tuple[int, bytes]] = field(default_factory=list)
    rests: list[tuple[int, bytes]] = field(default_factory=list)


class Digest:
    """The digest of a file of `size` bytes. Several threads may add different parts."""

    def __init__(self, size: int) -> None:
        self._size = size
        count = -(-size // CELL)
        self._digests = bytearray(count * WIDTH)
        self._missing = set(range(count))
        self._parts: dict[int, tuple[bytearray, list[tuple[int, int]]]] = {}
        self._lock = Lock()

    def add(self, data: memoryview, offset: int) -> None:
        """Add the bytes of the file from `offset`. Each byte may be added only once."""
        end = offset + len(data)
        for cell in range(offset // CELL, -(-end // CELL)):
            first, last = cell * CELL, min((cell + 1) * CELL, self._size)
            part = data[max(first, offset) - offset : min(last, end) - offset]
            if len(part) == last - first:
                self._set(cell, part)
            else:
                self._add_part(cell, part, max(first, offset) - first, last - first)

    def _set(self, cell: int, content: memoryview | bytearray | bytes) -> None:
        self._digests[cell * WIDTH : (cell + 1) * WIDTH] = xxh3_128_digest(content)
        with self._lock:
            self._missing.discard(cell)

    def _add_part(self, cell: int, part: memoryview, at: int, size: int) -> None:
        """Keep a part of a cell until the rest of it has been added."""
        with self._lock:
            content, ranges = self._parts.setdefault(cell, (bytearray(size), []))
            content[at : at + len(part)] = part
            ranges.append((at, at + len(part)))
            if sum(end - begin for begin, end in ranges) < size:
                return
            del self._parts[cell]
        self._set(cell, content)

    def drop(self, offset: int, nbytes: int) -> None:
        """Forget bytes that have changed since they were added."""
        with self._lock:
            self._missing.update(range(offset // CELL, -(-(offset + nbytes) // CELL)))

    def seen(self) -> Seen:
        """Everything added so far, to be merged into a digest of the same file elsewhere."""
        found, count = Seen(), len(self._digests) // WIDTH
        edges = sorted({-1, *self._missing, count})
        for before, after in pairwise(edges):
            if after - before > 1:
                found.cells.append((before + 1, bytes(self._digests[(before + 1) * WIDTH : after * WIDTH])))
        for cell, (content, ranges) in self._parts.items():
            found.rests += [(cell * CELL + begin, bytes(content[begin:end])) for begin, end in ranges]
        return found

    def merge(self, seen: Seen) -> None:
        """Merge what was added elsewhere, once."""
        for first, digests in seen.cells:
            self._digests[first * WIDTH : first * WIDTH + len(digests)] = digests
            with self._lock:
                self._missing.difference_update(range(first, first + len(digests) // WIDTH))
        for offset, content in seen.rests:
            self.add(memoryview(content), offset)

    def finish(self, path: Path, is_stopped: Callable[[], bool]) -> str | None:
        """The digest in hexadecimal. Missing cells are read from the file at `path`; None if stopped."""
        if self._missing:
            with open_file(path) as file:
                for cell in sorted(self._missing):
                    if is_stopped():
                        return None
                    self._set(cell, file.read(cell * CELL, CELL))
        return str(xxh3_128_hexdigest(self._digests))


def digest_of(path: Path, on_bytes: Callable[[int], None], is_stopped: Callable[[], bool]) -> str:
    """The digest of the bytes on disk (bypassing the page cache if the system allows it) or in a store.

    Raises OSError, and ReshardError for what a store refuses.
    """
    if not isinstance(path, StorePath):
        _leave_cache(path)
    with open_file(path) as file:
        size = file.size
        digest, room = Digest(size), memoryview(bytearray(min(SPAN, size)))
        for offset in range(0, size, SPAN):
            part = room[: min(SPAN, size - offset)]
            if is_stopped() or file.fill([(offset, part)]) is not None:
                return NONE
            digest.add(part, offset)
            on_bytes(len(part))
        return digest.finish(path, is_stopped) or NONE


def _leave_cache(path: Path) -> None:
    """Ask the system to read a file from disk instead of the page cache."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
