"""Files being written: full pages bypass the page cache, edges go through it, and the file is durable at the end."""

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

from reshard.base.free_memory import free_memory

PAGE_BYTES = 4096
"""Alignment of direct writes: in the file, in memory and in length."""

MIN_DIRECT_BYTES = 64 << 10
"""Bytes from which a direct write pays off."""

CACHED_DIVISOR = 16
"""An output goes through the page cache if it takes 1/CACHED_DIVISOR of the available memory or less: it is written
as fast, and the next program that loads it does not read the disk. Linux starts to write dirty pages back at
a tenth of that memory (vm.dirty_background_ratio), and the two slow each other down (docs/performance.md)."""

SLICE_BYTES = 128 << 10
"""Bytes per write through the page cache. The kernel sizes the memory that it takes for a file by it: larger
writes ask for large contiguous pieces, which took three times as long to find as small ones (docs/performance.md)."""

WRITEBACK_BYTES = 16 << 20
"""Dirty bytes of a file after which their writeback starts, so that fsync has little left to do."""


class Sink:
    """A file of known size, open for writing, in an existing folder. Threads may write different parts of it.

    A file that an earlier run has begun keeps its content.

    The bytes must be on disk before the file is published, so for an output that the page cache cannot keep, the cache
    would only be a detour: twice the memory traffic, and pages that displace the source's. The full pages of such an
    output are written to disk directly (`direct`) if the file system supports it (tmpfs, for example, does not), the
    rest through the cache. A file that need not be `durable` is left to the cache, and the system writes it back when
    it likes.
    """

    def __init__(self, path: Path, size: int, *, durable: bool = True, direct: bool = True) -> None:
        self._cached = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        os.ftruncate(self._cached, size)
        self._durable = durable
        self._direct = _open_direct(path) if durable and direct and size >= MIN_DIRECT_BYTES else None
        if self._direct is not None:
            allocate(self._cached, 0, size)
        self._dirty = 0
        self._is_lost = False
        self._writing = Lock()

    def write(self, data: memoryview, offset: int) -> None:
        """Write `data` at byte `offset`; fastest from a `PageBuffer` that was aligned for that offset."""
        head = -offset % PAGE_BYTES
        body = (len(data) - head) // PAGE_BYTES * PAGE_BYTES
        if self._direct is None or body < MIN_DIRECT_BYTES or (_address(data) + head) % PAGE_BYTES:
            self._write_cached(data, offset)
            return
        try:
            _write(self._direct, data[head : head + body], offset + head, body)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: larger alignment needed, or direct writes unsupported
                raise
            self._write_cached(data, offset)
            return
        self._write_cached(data[:head], offset)
        self._write_cached(data[head + body :], offset + head + body)

    def _write_cached(self, data: memoryview, offset: int) -> None:
        with self._writing:  # the kernel lets one thread write a file at a time, and the others spin
            _write(self._cached, data, offset, SLICE_BYTES)
            self._dirty += len(data)
            if self._durable and self._dirty >= WRITEBACK_BYTES:
                self._dirty = 0
                _sync_file_range(self._cached, 0, 0, 2)  # SYNC_FILE_RANGE_WRITE: starts it, and does not wait

    def flush(self) -> os.stat_result:
        """Wait until the bytes written so far are on disk. Returns the status of the file."""
        self._wait(getattr(os, "fdatasync", os.fsync))  # macOS has no fdatasync
        return os.fstat(self._cached)

    def close(self) -> os.stat_result:
        """Make the file durable: the rename that publishes it must not reach the disk before its bytes.

        Returns its status.
        """
        self._wait(os.fsync)
        status = os.fstat(self._cached)
        self.abandon()
        return status

    def _wait(self, sync: Callable[[int], None]) -> None:
        """Wait for the disk. Bytes that it refused once are lost, although the kernel reports it only once."""
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
        """Close the file without waiting for the disk, if it is open."""
        for descriptor in (self._cached, self._direct):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._cached, self._direct = -1, None


class PageBuffer:
    """Reusable memory of one thread, aligned to pages as the file is, so that full pages can be written directly."""

    def __init__(self, nbytes: int) -> None:
        self._memory = _pages(nbytes + PAGE_BYTES)

    def array(self, nbytes: int, offset: int) -> np.ndarray[Any, Any]:
        """`nbytes` bytes for data to be written at byte `offset`; their previous content is lost."""
        skew = offset % PAGE_BYTES
        if skew + nbytes > self._memory.nbytes:
            self._memory = _pages(nbytes + PAGE_BYTES)
        return self._memory[skew : skew + nbytes]


def stays_cached(nbytes: int) -> bool:
    """Whether the page cache can keep an output of `nbytes` until a program loads it."""
    free = min((each.free for each in free_memory(os.getpid())), default=0)  # 0: not Linux
    return nbytes * CACHED_DIVISOR <= free


def _pages(nbytes: int) -> np.ndarray[Any, Any]:
    try:
        return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)  # a mapping begins at a page boundary
    except OSError as error:
        raise MemoryError(f"{nbytes:,} bytes") from error


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def _open_direct(path: Path) -> int | None:
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except (OSError, AttributeError):  # the file system or the operating system has no direct writes
        return None


def _write(descriptor: int, data: memoryview, offset: int, step: int) -> None:
    while data:
        count = os.pwrite(descriptor, data[:step], offset)
        data, offset = data[count:], offset + count


def _libc(name: str, *arguments: Any) -> Callable[..., object]:
    """A Linux function that Python does not wrap; on other systems, a function that does nothing."""
    try:
        call = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return lambda *values: None
    call.argtypes = arguments
    return call  # type: ignore[no-any-return]


_fallocate = _libc("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_sync_file_range = _libc("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def allocate(descriptor: int, offset: int, nbytes: int) -> None:
    """Allocate the disk blocks of a part of a file before it is written.

    Threads then do not wait for each other, and the space is safe if the disk fills up meanwhile. The file keeps its
    size. Does nothing if the file system does not support it: `posix_fallocate` would write zeros instead.
    """
    _fallocate(descriptor, 1, offset, nbytes)  # FALLOC_FL_KEEP_SIZE
