"""Digests of files whose bytes pass in any order.

A file is cut into cells of `CELL` bytes, the last of which may be shorter. The digest of the file is the XXH3-128 of
the XXH3-128 digests of its cells, one after another, each of 16 bytes with the most significant first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from xxhash import xxh3_128_digest, xxh3_128_hexdigest

CELL = 256 << 10
WIDTH = 16
"""Bytes of one digest."""
NAME = "XXH3-128 of the XXH3-128 digests of each 256 KiB"
NONE = "0" * 2 * WIDTH
"""Stands for a digest that nobody knows yet."""
SPAN = 16 * CELL
"""Bytes that are read at a time."""


class Digest:
    """The digest of a file of `size` bytes. Several threads may let different parts of it pass."""

    def __init__(self, size: int) -> None:
        self._size = size
        count = -(-size // CELL)
        self._digests = bytearray(count * WIDTH)
        self._missing = set(range(count))
        self._parts: dict[int, tuple[bytearray, list[int]]] = {}
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
            content, left = self._parts.setdefault(cell, (bytearray(size), [size]))
            content[at : at + len(part)] = part
            left[0] -= len(part)
            if left[0]:
                return
            del self._parts[cell]
        self._set(cell, content)

    def drop(self, offset: int, nbytes: int) -> None:
        """Forget bytes that have changed since they passed."""
        with self._lock:
            self._missing.update(range(offset // CELL, -(-(offset + nbytes) // CELL)))

    def finish(self, path: Path, is_stopped: Callable[[], bool]) -> str | None:
        """The digest in hexadecimal. What has not passed is read from the file, which lies at `path`, until stopped."""
        if self._missing:
            with open(path, "rb", buffering=0) as file:
                for cell in sorted(self._missing):
                    if is_stopped():
                        return None
                    self._set(cell, os.pread(file.fileno(), CELL, cell * CELL))
        return str(xxh3_128_hexdigest(self._digests))


def digest_of(path: Path, on_bytes: Callable[[int], None], is_stopped: Callable[[], bool]) -> str:
    """The digest of the bytes that lie on the disk, past the page cache where the system lets us. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        digest, room, offset = Digest(size), memoryview(bytearray(SPAN)), 0
        while offset < size and not is_stopped():
            count = file.readinto(room[: min(SPAN, size - offset)])
            if not count:
                break
            digest.add(room[:count], offset)
            offset += count
            on_bytes(count)
        return (digest.finish(path, is_stopped) if offset == size else None) or NONE
