"""Files as they are written: whole pages past the page cache, edges through it, and durable at the end."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

PAGE = 4096
"""What direct writes are aligned to: in the file, in memory and in length."""

DIRECT = 64 << 10
"""Bytes from which a direct write pays."""

CACHED = 16
"""An output goes through the page cache if it takes at most one part in this many of the available memory: then it is
written as fast, and the next program to load it does not read the disk. Linux starts to write dirty pages back at
a tenth of that memory (vm.dirty_background_ratio), and the two get in each other's way (docs/performance.md)."""

SLICE = 128 << 10
"""Bytes of one write through the page cache. The kernel sizes the memory that it takes for a file by it: larger
writes ask for large contiguous pieces, which took three times as long to find as small ones (docs/performance.md)."""

WRITEBACK = 16 << 20
"""Bytes after which a file's dirty pages start on their way to the disk, so that fsync finds little left to do."""


class Sink:
    """A file of a known size, open for writing, in a folder that is there. Threads may write different parts of it.

    A file that an earlier run has begun is opened with what it holds.

    What is written has to be on the disk before the file is published, so for an output that the page cache cannot
    keep it would only be a detour: twice the memory traffic, and pages that displace the source's. The whole pages of
    such an output go to the disk as `direct` writes where the file system has them (tmpfs, for one, does not), the rest
    through the cache. A file that need not be `durable` is left to the cache, and to the system to write when it likes.
    """

    def __init__(self, path: Path, size: int, *, durable: bool = True, direct: bool = True) -> None:
        self._cached = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        os.ftruncate(self._cached, size)
        self._durable = durable
        self._direct = _open_direct(path) if durable and direct and size >= DIRECT else None
        if self._direct is not None:
            allocate(self._cached, 0, size)
        self._dirty = 0
        self._is_lost = False
        self._writing = Lock()

    def write(self, data: memoryview, offset: int) -> None:
        """Write `data` at byte `offset`, fastest from a `Buffer` that was laid out for that offset."""
        head = -offset % PAGE
        body = (len(data) - head) // PAGE * PAGE
        if self._direct is None or body < DIRECT or (_address(data) + head) % PAGE:
            self._write_cached(data, offset)
            return
        try:
            _write(self._direct, data[head : head + body], offset + head, body)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: this disk wants a larger alignment, or none will do
                raise
            self._write_cached(data, offset)
            return
        self._write_cached(data[:head], offset)
        self._write_cached(data[head + body :], offset + head + body)

    def _write_cached(self, data: memoryview, offset: int) -> None:
        with self._writing:  # the kernel lets one write a file at a time, and the others spin
            _write(self._cached, data, offset, SLICE)
            self._dirty += len(data)
            if self._durable and self._dirty >= WRITEBACK:
                self._dirty = 0
                start_writeback(self._cached)

    def flush(self) -> None:
        """Wait until what was written is on the disk."""
        self._wait(getattr(os, "fdatasync", os.fsync))  # macOS has none

    def close(self) -> int:
        """Make the file durable, as the rename that publishes it must not overtake its bytes.

        Returns the time of its last change, in nanoseconds.
        """
        self._wait(os.fsync)
        modified = os.fstat(self._cached).st_mtime_ns
        self.abandon()
        return modified

    def _wait(self, sync: Callable[[int], None]) -> None:
        """Wait for the disk. What it refused once is lost, though the kernel says so one time only."""
        if self._is_lost:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if not self._durable or self._cached < 0:
            return
        try:
            sync(self._cached)
        except OSError:
            self._is_lost = True
            raise

    def abandon(self) -> None:
        """Close the file without waiting for the disk, if it is not closed."""
        for descriptor in (self._cached, self._direct):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._cached, self._direct = -1, None


class Buffer:
    """Reusable memory of one thread, lying in its page as the file does, so that whole pages can go directly."""

    def __init__(self, nbytes: int) -> None:
        self._memory = _pages(nbytes + PAGE)

    def room(self, nbytes: int, offset: int) -> np.ndarray[Any, Any]:
        """`nbytes` bytes for what will be written at byte `offset`; what they held before is lost."""
        skew = offset % PAGE
        if skew + nbytes > self._memory.nbytes:
            self._memory = _pages(nbytes + PAGE)
        return self._memory[skew : skew + nbytes]


def stays_cached(nbytes: int) -> bool:
    """Whether the page cache can keep an output of `nbytes` until something loads it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return False
    return nbytes * CACHED <= kilobytes << 10


def _pages(nbytes: int) -> np.ndarray[Any, Any]:
    try:
        return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)  # a mapping begins at a page
    except OSError as error:
        raise MemoryError(f"{nbytes:,} bytes") from error


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def _open_direct(path: Path) -> int | None:
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except (OSError, AttributeError):  # a file system, or an operating system, without
        return None


def _write(descriptor: int, data: memoryview, offset: int, step: int) -> None:
    while data:
        count = os.pwrite(descriptor, data[:step], offset)
        data, offset = data[count:], offset + count


def _libc(name: str, *arguments: Any) -> Callable[..., object]:
    """A function of Linux that Python does not wrap; elsewhere one that does nothing."""
    try:
        call = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return lambda *given: None
    call.argtypes = arguments
    return call  # type: ignore[no-any-return]


_fallocate = _libc("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_sync_file_range = _libc("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def allocate(descriptor: int, offset: int, nbytes: int) -> None:
    """Find the blocks of a part of a file before it is written: threads need not wait for each other there, and a disk
    that fills up meanwhile has them. The file keeps its size.

    Where the file system cannot, nothing happens: `posix_fallocate` would write zeros instead.
    """
    _fallocate(descriptor, 1, offset, nbytes)  # FALLOC_FL_KEEP_SIZE


def start_writeback(descriptor: int) -> None:
    """Start what is dirty on its way to the disk, and do not wait."""
    _sync_file_range(descriptor, 0, 0, 2)  # SYNC_FILE_RANGE_WRITE
