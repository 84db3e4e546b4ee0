"""Move elements: read pieces from their files into a buffer, cast where asked, checksum what passes."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from threading import Lock
from typing import Any

import numpy as np
from isal.isal_zlib import crc32, crc32_combine
from numpy.lib.stride_tricks import as_strided

from reshard.algebra.dtypes import DType
from reshard.algebra.storage import Storage
from reshard.algebra.tensors import Cells, Computed, Tensor
from reshard.algebra.views import Axis, Piece
from reshard.errors import Problem, ReshardError

RAW: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Elements are moved as integers of their width, whatever they mean."""

RUN = 32 << 10
"""Bytes side by side from which they are read straight to their place: measured, docs/performance.md."""

GAP = 32 << 10
"""Unused bytes between two runs from which two reads are cheaper than one across: measured, docs/performance.md."""

SPAN = 2 << 20
"""Bytes that are read at a time to pick elements from: they stay in the cache of the processor."""


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

    def read(self, path: str, parts: Iterable[tuple[int, memoryview]]) -> None:
        """Fill memory with the bytes of `path` from the offset beside it.

        Files are read and not mapped: a page of a mapping that cannot be read kills the process. Raises ReshardError if
        the file ends before, or if the system cannot read it.
        """
        try:
            descriptor = self.descriptor(path)
            for offset, out in parts:
                count = os.preadv(descriptor, (out,), offset)
                while count < len(out):
                    more = os.preadv(descriptor, (out[count:],), offset + count)
                    if not more:
                        raise self._short(path, offset + len(out))
                    count += more
        except OSError as error:
            raise _unreadable(path, error) from error

    def _short(self, path: str, end: int) -> ReshardError:
        return ReshardError(
            "a file ends before its tensors do",
            file=path,
            expected=f"at least {end} bytes",
            found=f"{os.fstat(self.descriptor(path)).st_size} bytes",
            remedy="the file changed or was cut short while it was read: copy it again",
        )

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def _unreadable(path: str, error: OSError) -> ReshardError:
    return ReshardError(
        "a file cannot be read",
        file=path,
        found=error.strerror or str(error),
        remedy="check the disk or the file server that holds it, then run the same command again",
    )


class Ledger:
    """The CRC32 of every storage that recorded one, put together from the ranges that passed by."""

    def __init__(self) -> None:
        self._seen: dict[Storage, list[tuple[int, int, int]]] = {}
        self._lock = Lock()

    def record(self, storage: Storage, begin: int, data: memoryview) -> None:
        """Note that bytes `begin` and on of `storage` were `data`. What came before is not counted again."""
        if storage.crc32 is None:
            return
        end = begin + len(data)
        value = crc32(data)
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

    def touch(self, storage: Storage) -> None:
        """Have a storage checked at the end, of which an earlier run has taken something."""
        if storage.crc32 is not None:
            with self._lock:
                self._seen.setdefault(storage, [])

    def is_right(self, storage: Storage) -> bool:
        """Whether all bytes of a storage have passed, and are those that were recorded."""
        with self._lock:
            return self._seen.get(storage) == [(0, storage.nbytes, storage.crc32)]

    def settle(self, files: Files) -> list[Storage]:
        """Read what did not pass of each storage that was touched, and return those whose CRC32 is wrong."""
        wrong = []
        room = np.empty(SPAN, np.uint8)
        for storage, ranges in self._seen.items():
            total, position = 0, 0
            for begin, end, value in [*ranges, (storage.nbytes, storage.nbytes, 0)]:
                while position < begin:
                    part = room[: begin - position].data
                    files.read(storage.path, [(storage.offset + position, part)])
                    total = crc32(part, total)
                    position += len(part)
                total = crc32_combine(total, value, end - begin)
                position = end
            if total != storage.crc32:
                wrong.append(storage)
        return wrong


class Gatherer:
    """Reads pieces for one thread. `limit` bounds what it holds at a time beside the result, in bytes."""

    def __init__(self, files: Files, ledger: Ledger | None, limit: int = 32 << 20) -> None:
        self._files = files
        self._ledger = ledger
        self._limit = limit
        self._room = np.empty(0, np.uint8)

    def fill(self, pieces: tuple[Piece, ...], dtype: DType, out: np.ndarray[Any, Any]) -> None:
        """Put the elements of `pieces` at their places in `out`, whose items are as wide as `dtype`."""
        for piece in pieces:
            source = piece.source
            if isinstance(source, Computed):
                self._compute(source, piece, dtype, out)
            elif isinstance(source, Cells) and source.storage.path:
                self._place(source, piece, dtype, out)
            else:
                _strided(out, piece.at, [(n, t) for n, _, t in piece.axes])[...] = 0

    def read(self, tensor: Tensor, begin: int, end: int) -> np.ndarray[Any, Any]:
        """Raw elements `begin` to `end` of a tensor, in row-major order."""
        out = np.empty(end - begin, RAW[tensor.dtype.itemsize])
        self.fill(tensor.view.window(begin, end), tensor.dtype, out)
        return out

    def _compute(self, source: Computed, piece: Piece, dtype: DType, out: np.ndarray[Any, Any]) -> None:
        """Compute runs of elements, or all that lies between the first and the last one, and pick from it."""
        if (piece.source_end - piece.start) * source.dtype.itemsize > self._limit:
            for part in _halves(piece):
                self._compute(source, part, dtype, out)
            return
        packed, length, repeats = _packed(piece, 0)
        if len(repeats) == 1:
            ((count, step, _),) = repeats
            span = source.runs(piece.start, count, step, length, self.read)
        else:
            packed, span = piece, source.values(piece.start, piece.source_end, self.read)
        self._pick(span, source.dtype, packed, dtype, out)

    def _place(self, cells: Cells, piece: Piece, dtype: DType, out: np.ndarray[Any, Any]) -> None:
        """Read long runs of elements where they belong; read others with what lies between them, and pick."""
        size = cells.dtype.itemsize
        if cells.dtype == dtype and (run := _run(piece)) * size >= RUN:
            self._read(cells, _starts(piece.start, piece.at, piece.axes[:-1]), run, out)
            return
        # A checksum is of all bytes: where there is one, a gap that is read now need not be read at the end.
        is_summed = self._ledger is not None and cells.storage.crc32 is not None
        packed, length, repeats = _packed(piece, cells.storage.nbytes if is_summed else GAP // size)
        if packed.source_end * size > min(self._limit, SPAN):
            for part in _halves(piece):
                self._place(cells, part, dtype, out)
            return
        room = self._room_of(packed.source_end * size).view(RAW[size])
        self._read(cells, _starts(piece.start, 0, repeats), length, room)
        self._pick(room, cells.dtype, packed, dtype, out)

    def _room_of(self, nbytes: int) -> np.ndarray[Any, Any]:
        """`nbytes` bytes that the next call gives again."""
        if self._room.nbytes < nbytes:
            self._room = np.empty(nbytes, np.uint8)
        return self._room[:nbytes]

    @staticmethod
    def _pick(
        span: np.ndarray[Any, Any], stored: DType, piece: Piece, dtype: DType, out: np.ndarray[Any, Any]
    ) -> None:
        """Put the elements of a piece, all of which lie in `span`, at their places in `out`."""
        values = _strided(span, 0, [(n, s) for n, s, _ in piece.axes])
        if stored != dtype:
            values = cast(values, stored, dtype)
        _strided(out, piece.at, [(n, t) for n, _, t in piece.axes])[...] = values

    def _read(
        self, cells: Cells, starts: Iterable[tuple[int, int]], length: int, out: np.ndarray[Any, Any]
    ) -> None:
        """Read `length` elements from each start to their place in `out`, and note them in the ledger."""
        size, offset, memory = cells.dtype.itemsize, cells.storage.offset, out.view(np.uint8).data
        nbytes = length * size
        places = ((start * size, memory[at * size : at * size + nbytes]) for start, at in starts)
        if self._ledger is None or cells.storage.crc32 is None:
            self._files.read(cells.storage.path, ((offset + begin, part) for begin, part in places))
            return
        for begin, part in places:
            self._files.read(cells.storage.path, [(offset + begin, part)])
            self._ledger.record(cells.storage, begin, part)


def _run(piece: Piece) -> int:
    """How many elements of a piece lie side by side in its source and in its target, at a time."""
    return piece.axes[-1][0] if piece.axes and piece.axes[-1][1:] == (1, 1) else 1


def _starts(first: int, second: int, axes: Sequence[Axis]) -> Iterable[tuple[int, int]]:
    """Where something that repeats along `axes` starts on both sides, from `first` and `second` on."""
    starts: Iterable[tuple[int, int]] = [(first, second)]
    for axis in axes:
        starts = _repeated(starts, *axis)
    return starts


def _repeated(
    starts: Iterable[tuple[int, int]], count: int, first: int, second: int
) -> Iterator[tuple[int, int]]:
    for a, b in starts:
        for i in range(count):
            yield a + i * first, b + i * second


def _packed(piece: Piece, gap: int) -> tuple[Piece, int, list[Axis]]:
    """A piece as it lies in memory, from 0 on, when gaps of more than `gap` elements of its source are left out.

    Also how many elements are read at a time, and the axes along which such reads repeat: (count, step in the source,
    step in memory).
    """
    axes, repeats = list(piece.axes), list[Axis]()
    end = length = 1
    for i in sorted(range(len(axes)), key=lambda i: axes[i][1]):  # from the innermost of the source
        count, source, target = axes[i]
        if repeats or source - length > gap:
            repeats.append((count, source, end))
            axes[i] = (count, end, target)
            end *= count
        else:
            end = length = length + (count - 1) * source
    return Piece(piece.source, 0, piece.at, tuple(axes)), length, repeats


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
        narrow: np.ndarray[Any, Any] = np.asarray(values, np.float32)
    bits = narrow.view(np.uint32)
    rounded = bits >> 16  # one array, changed in place: several would not fit in the cache of a core
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    halves: np.ndarray[Any, Any] = rounded.astype(np.uint16)
    is_nan = np.isnan(narrow)
    if is_nan.any():
        halves[is_nan] = (bits[is_nan] >> 16) | 0x40
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
