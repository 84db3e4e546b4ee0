"""Move elements: read pieces from their files into a buffer, cast where asked, checksum what passes."""

from __future__ import annotations

import os
from collections import OrderedDict
from threading import Lock
from typing import Any

import numpy as np
from isal.isal_zlib import crc32, crc32_combine
from numpy.lib.stride_tricks import as_strided

from reshard.checkpoint import Cells
from reshard.dtypes import DType
from reshard.errors import Problem, ReshardError
from reshard.storage import Storage
from reshard.views import Piece

RAW: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Elements are moved as integers of their width, whatever they mean."""

DIRECT = 16 << 10
"""Runs of at least this many bytes are read straight to their place; shorter ones with what lies between."""


class Files:
    """Open file descriptors, least recently used first, for one thread."""

    def __init__(self, limit: int = 128) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()
        self._limit = limit

    def descriptor(self, path: str) -> int:
        """A descriptor for reading `path`."""
        found = self._open.get(path)
        if found is not None:
            self._open.move_to_end(path)
            return found
        while len(self._open) >= self._limit:
            os.close(self._open.popitem(last=False)[1])
        opened = self._open[path] = os.open(path, os.O_RDONLY)
        return opened

    def read(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from byte `offset` of `path`, or raise: a short read is a truncated file."""
        descriptor = self.descriptor(path)
        done = 0
        while done < len(into):
            count = os.preadv(descriptor, [into[done:]], offset + done)
            if count == 0:
                raise ReshardError(
                    "a file ends before its tensors do",
                    file=path,
                    expected=f"at least {offset + len(into)} bytes",
                    found=f"{offset + done} bytes",
                    remedy="the file changed or was cut short while it was read: copy it again",
                )
            done += count

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


class Ledger:
    """The CRC32 of every storage that recorded one, put together from the ranges that passed by."""

    def __init__(self) -> None:
        self._seen: dict[Storage, list[tuple[int, int, int]]] = {}
        self._lock = Lock()

    def record(self, storage: Storage, begin: int, data: memoryview) -> None:
        """Note that bytes `begin` and on of `storage` were `data`. What came before is not counted again."""
        if storage.crc32 is None:
            return
        value, end = crc32(data), begin + len(data)
        with self._lock:
            ranges = self._seen.setdefault(storage, [])
            place = len(ranges)
            while place and ranges[place - 1][0] > begin:
                place -= 1
            before = ranges[place - 1] if place else None
            after = ranges[place] if place < len(ranges) else None
            if (before and before[1] > begin) or (after and after[0] < end):
                return
            if before and before[1] == begin:
                begin, value = before[0], crc32_combine(before[2], value, end - begin)
                place -= 1
                del ranges[place]
            if after and after[0] == end:
                value, end = crc32_combine(value, after[2], after[1] - end), after[1]
                del ranges[place]
            ranges.insert(place, (begin, end, value))

    def settle(self, files: Files) -> list[Storage]:
        """Read what did not pass of each storage that was touched, and return those whose CRC32 is wrong."""
        buffer = memoryview(bytearray(1 << 20))
        wrong = []
        for storage, ranges in self._seen.items():
            total, position = 0, 0
            for begin, end, value in [*ranges, (storage.nbytes, storage.nbytes, 0)]:
                while position < begin:
                    part = buffer[: min(len(buffer), begin - position)]
                    files.read(storage.path, storage.offset + position, part)
                    total = crc32(part, total)
                    position += len(part)
                total = crc32_combine(total, value, end - begin)
                position = end
            if total != storage.crc32:
                wrong.append(storage)
        return wrong


class Gatherer:
    """Reads pieces for one thread. `scratch` bounds the memory of strided reads, in bytes."""

    def __init__(self, files: Files, ledger: Ledger | None, scratch: int) -> None:
        self._files = files
        self._ledger = ledger
        self._scratch = np.empty(scratch, np.uint8)

    def fill(self, pieces: tuple[Piece, ...], dtype: DType, out: np.ndarray[Any, Any]) -> None:
        """Put the elements of `pieces` at their places in `out`, whose items are as wide as `dtype`."""
        for piece in pieces:
            cells = piece.source
            assert isinstance(cells, Cells)
            if not cells.storage.path:
                _strided(out, piece.at, [(n, t) for n, _, t in piece.axes])[...] = 0
            elif cells.dtype == dtype and _run(piece) * dtype.itemsize >= DIRECT:
                self._direct(cells, piece, out)
            else:
                self._strided(cells, piece, dtype, out)

    def _direct(self, cells: Cells, piece: Piece, out: np.ndarray[Any, Any]) -> None:
        """Long runs: one read each, straight into the buffer."""
        size, run = cells.dtype.itemsize, _run(piece)
        raw = out.data.cast("B")
        outer = piece.axes[:-1]
        for index in np.ndindex(*[n for n, _, _ in outer]):
            start = piece.start + sum(i * s for i, (_, s, _) in zip(index, outer, strict=True))
            at = piece.at + sum(i * t for i, (_, _, t) in zip(index, outer, strict=True))
            self._read(cells.storage, start * size, raw[at * size : (at + run) * size])

    def _strided(self, cells: Cells, piece: Piece, dtype: DType, out: np.ndarray[Any, Any]) -> None:
        """Short runs: read all that lies between the first and the last, and pick in memory."""
        size = cells.dtype.itemsize
        span = (piece.source_end - piece.start) * size
        if span > self._scratch.nbytes:
            for part in _halves(piece):
                self._strided(cells, part, dtype, out)
            return
        covering = self._scratch[:span]
        self._read(cells.storage, piece.start * size, covering.data)
        values = _strided(covering.view(RAW[size]), 0, [(n, s) for n, s, _ in piece.axes])
        if cells.dtype != dtype:
            values = cast(values, cells.dtype, dtype)
        _strided(out, piece.at, [(n, t) for n, _, t in piece.axes])[...] = values

    def _read(self, storage: Storage, begin: int, into: memoryview) -> None:
        self._files.read(storage.path, storage.offset + begin, into)
        if self._ledger is not None:
            self._ledger.record(storage, begin, into)


def _run(piece: Piece) -> int:
    """How many elements lie side by side both in the source and in the target."""
    if not piece.axes:
        return 1
    count, source, target = piece.axes[-1]
    return count if source == target == 1 else 1


def _halves(piece: Piece) -> tuple[Piece, Piece]:
    """Cut a piece in two along the axis that reaches furthest in the source."""
    axis = max(range(len(piece.axes)), key=lambda i: (piece.axes[i][0] - 1) * piece.axes[i][1])
    count, source, target = piece.axes[axis]
    half = count // 2

    def part(n: int, first: int) -> Piece:
        axes = (*piece.axes[:axis], *([(n, source, target)] if n > 1 else []), *piece.axes[axis + 1 :])
        return Piece(piece.source, piece.start + first * source, piece.at + first * target, axes)

    return part(half, 0), part(count - half, half)


def _strided(array: np.ndarray[Any, Any], first: int, axes: list[tuple[int, int]]) -> np.ndarray[Any, Any]:
    """The elements of a flat array from `first` at (count, stride) `axes`."""
    shape = [n for n, _ in axes]
    return as_strided(array[first:], shape, [stride * array.itemsize for _, stride in axes])


def cast(values: np.ndarray[Any, Any], source: DType, target: DType) -> np.ndarray[Any, Any]:
    """Convert raw elements of one float type to another, rounding to nearest even as torch does."""
    return _from_float(as_float(values, source), target)


FLOATS: dict[str, Any] = {"float16": np.float16, "float32": np.float32, "float64": np.float64}


def as_float(values: np.ndarray[Any, Any], source: DType) -> np.ndarray[Any, Any]:
    """Raw elements as numpy floats that hold them exactly."""
    if source.name == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    floats: np.ndarray[Any, Any] = np.ascontiguousarray(values).view(FLOATS[source.name])
    return floats


def _from_float(values: np.ndarray[Any, Any], target: DType) -> np.ndarray[Any, Any]:
    with np.errstate(over="ignore"):  # an overflow becomes Inf, which the executor reports by name
        if target.name != "bfloat16":
            narrowed: np.ndarray[Any, Any] = values.astype(FLOATS[target.name])
            raw: np.ndarray[Any, Any] = narrowed.view(RAW[target.itemsize])
            return raw
        bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    is_nan = (bits & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)
    halves: np.ndarray[Any, Any] = np.where(is_nan, (bits >> 16) | np.uint32(0x40), rounded).astype(np.uint16)
    return halves


def castable(dtype: DType) -> bool:
    """Whether `cast` knows this type."""
    return dtype.name == "bfloat16" or dtype.name in FLOATS


def crc_problem(storage: Storage, tensor: str | None) -> Problem:
    """The error for a storage whose bytes are not those that were written."""
    return Problem(
        "the bytes of a tensor changed since they were written",
        tensor=tensor,
        file=storage.path,
        rule="the CRC32 that the file records",
        expected=f"{storage.crc32:08x} over {storage.nbytes} bytes from byte {storage.offset}",
        remedy="copy the file again from where it was written; a disk or a transfer damaged it",
    )
