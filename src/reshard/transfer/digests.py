"""Digests of files whose bytes pass in any order.

A file is cut into cells of `CELL` bytes, the last of which may be shorter. The digest of the file is the XXH3-128 of
the XXH3-128 digests of its cells, one after another, each of 16 bytes with the most significant first.
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
"""Stands for a digest that nobody knows yet."""
SPAN = 16 * CELL
"""Bytes that are read at a time."""


@dataclass
class Seen:
    """What has passed of a file: digests of cells side by side, with the number of the first one, and rests of others.

    A rest is a range of bytes, with its place in the file.
    """

    cells: list[tuple[int, bytes]] = field(default_factory=list)
    rests: list[tuple[int, bytes]] = field(default_factory=list)


class Digest:
    """The digest of a file of `size` bytes. Several threads may let different parts of it pass."""

    def __init__(self, size: int) -> None:
        self._size = size
        count = -(-size // CELL)
        self._digests = bytearray(count * WIDTH)
        self._missing = set(range(count))
        self._parts: dict[int, tuple[bytearray, list[tuple[int, int]]]] = {}
        self._lock = Lock()

    def add(self, data: memoryview, offset: int) -> None:
        """Let the bytes from `offset` of the file pass, once."""
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
        """Keep a part of a cell until the rest of it has passed."""
        with self._lock:
            content, ranges = self._parts.setdefault(cell, (bytearray(size), []))
            content[at : at + len(part)] = part
            ranges.append((at, at + len(part)))
            if sum(end - begin for begin, end in ranges) < size:
                return
            del self._parts[cell]
        self._set(cell, content)

    def drop(self, offset: int, nbytes: int) -> None:
        """Forget bytes that have changed since they passed."""
        with self._lock:
            self._missing.update(range(offset // CELL, -(-(offset + nbytes) // CELL)))

    def seen(self) -> Seen:
        """What has passed, for the digest of the same file elsewhere."""
        found, count = Seen(), len(self._digests) // WIDTH
        edges = sorted({-1, *self._missing, count})
        for before, after in pairwise(edges):
            if after - before > 1:
                found.cells.append((before + 1, bytes(self._digests[(before + 1) * WIDTH : after * WIDTH])))
        for cell, (content, ranges) in self._parts.items():
            found.rests += [(cell * CELL + begin, bytes(content[begin:end])) for begin, end in ranges]
        return found

    def merge(self, seen: Seen) -> None:
        """Take in what has passed elsewhere, once."""
        for first, digests in seen.cells:
            self._digests[first * WIDTH : first * WIDTH + len(digests)] = digests
            with self._lock:
                self._missing.difference_update(range(first, first + len(digests) // WIDTH))
        for offset, content in seen.rests:
            self.add(memoryview(content), offset)

    def finish(self, path: Path, is_stopped: Callable[[], bool]) -> str | None:
        """The digest in hexadecimal. What has not passed is read from the file, which lies at `path`, until stopped."""
        if self._missing:
            with open_file(path) as file:
                for cell in sorted(self._missing):
                    if is_stopped():
                        return None
                    self._set(cell, file.read(cell * CELL, CELL))
        return str(xxh3_128_hexdigest(self._digests))


def digest_of(path: Path, on_bytes: Callable[[int], None], is_stopped: Callable[[], bool]) -> str:
    """The digest of the bytes that lie on the disk, past the page cache where the system lets us, or in a store.

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
    """Have the bytes of a file read from the disk, as far as the system can be asked to."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
