"""Move elements: read pieces from files into a buffer, cast them if requested, and checksum what is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from reshard.algebra.dtypes import DType
from reshard.algebra.storage import Storage
from reshard.algebra.tensors import Cells, Computed, Tensor
from reshard.algebra.views import Axis, Piece
from reshard.base.errors import Problem, raise_all
from reshard.stores import is_remote
from reshard.transfer.elements import CAST_BYTES_EACH, RAW_DTYPES, Overflows, cast
from reshard.transfer.ledger import Ledger, Passed, join
from reshard.transfer.shared_windows import Windows
from reshard.transfer.thread_files import OpenFiles

MIN_DIRECT_BYTES = 32 << 10
"""Runs of at least this many contiguous bytes are read directly to their place: measured, docs/performance.md."""

MAX_GAP_BYTES = 32 << 10
"""Two runs with more unused bytes than this between them are read separately: about what is copied out of the page
cache while one more read is made and its checksum noted (`python -m bench --only rows`, docs/performance.md)."""

READ_BYTES = 2 << 20
"""Bytes read at a time to pick elements from: they stay in the processor's cache."""


class Gatherer:
    """Reads pieces for one thread. `limit` bounds the bytes that it uses at a time in addition to the result.

    `windows`, if any, have the bytes of stores that others need, too.
    """

    def __init__(
        self, files: OpenFiles, ledger: Ledger | None, limit: int = 64 << 20, windows: Windows | None = None
    ) -> None:
        self._passed: Passed = {}
        self._lost = Overflows()
        self._files = files
        self._ledger = ledger
        self._windows = windows
        self._limit = limit
        self._scratch = np.empty(0, np.uint8)

    def fill(
        self, pieces: tuple[Piece, ...], dtype: DType, out: np.ndarray[Any, Any], limit: int | None = None
    ) -> None:
        """Copy the elements of `pieces` to their places in `out`, whose items are as wide as `dtype`."""
        limit = self._limit if limit is None else limit
        for piece in pieces:
            source = piece.source
            if isinstance(source, Computed):
                self._compute(source, piece, dtype, out, limit)
            elif isinstance(source, Cells) and source.storage.path:
                self._place_piece(source, piece, dtype, out, limit)
            else:
                _strided(out, piece.at, [(n, t) for n, _, t in piece.axes])[...] = 0

    def read(self, tensor: Tensor, begin: int, end: int, limit: int | None = None) -> np.ndarray[Any, Any]:
        """Raw elements `begin` to `end` of a tensor, in row-major order."""
        out = np.empty(end - begin, RAW_DTYPES[tensor.dtype.itemsize])
        self.fill(tensor.view.window(begin, end), tensor.dtype, out, limit)
        return out

    def _compute(
        self, source: Computed, piece: Piece, dtype: DType, out: np.ndarray[Any, Any], limit: int
    ) -> None:
        """Compute runs of elements, or everything between the first and the last one, and pick the piece's elements."""
        count = piece.source_end - piece.start
        packed, length, repeats = packed_piece(piece, 0)
        is_runs = len(repeats) == 1
        # Half of the limit is for the inputs, unless either half needs more; so all of `least` fits.
        few = source.memory_for(source.few)
        most = max(few, min(limit // 2, limit - (source.least_memory - few)))
        memory = source.memory_for_runs(*repeats[0][:2], length) if is_runs else source.memory_for(count)
        if source.dtype != dtype:
            memory += packed.numel * CAST_BYTES_EACH
        if packed.numel > source.few and memory > most:
            for part in _halves(piece):
                self._compute(source, part, dtype, out, limit)
            return
        read = _GathererInputs(self, limit - min(memory, most))
        if is_runs:
            ((count, step, _),) = repeats
            span = source.runs(piece.start, count, step, length, read)
        else:
            packed, span = piece, source.values(piece.start, piece.source_end, read)
        self._pick(span, source.dtype, packed, dtype, out)

    def _place_piece(
        self, cells: Cells, piece: Piece, dtype: DType, out: np.ndarray[Any, Any], limit: int
    ) -> None:
        """Read long runs directly to their places; read others with the gaps between them, and pick."""
        size = cells.dtype.itemsize
        if cells.dtype == dtype and (run := contiguous_run(piece)) * size >= MIN_DIRECT_BYTES:
            self._read(cells, _starts(piece.start, piece.at, piece.axes[:-1]), run, out)
            return
        # A checksum covers all bytes: if there is one, a gap that is read now need not be read at the end.
        is_summed = self._ledger is not None and cells.storage.crc32 is not None
        packed, length, repeats = packed_piece(
            piece, cells.storage.nbytes if is_summed else MAX_GAP_BYTES // size
        )
        most = min(limit // (size if cells.dtype == dtype else size + CAST_BYTES_EACH), READ_BYTES // size)
        if packed.axes and packed.source_end > most:
            for part in _halves(piece):
                self._place_piece(cells, part, dtype, out, limit)
            return
        picked = self._scratch_of(packed.source_end * size).view(RAW_DTYPES[size])
        has_gaps = bool(repeats) or packed.source_end > packed.numel
        windows = self._windows if has_gaps and is_remote(cells.storage.path) else None
        self._read(cells, _starts(piece.start, 0, repeats), length, picked, windows)
        self._pick(picked, cells.dtype, packed, dtype, out)

    def _scratch_of(self, nbytes: int) -> np.ndarray[Any, Any]:
        """A buffer of `nbytes` bytes, which the next call reuses."""
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes]

    def cast(self, values: np.ndarray[Any, Any], source: DType, target: DType) -> np.ndarray[Any, Any]:
        """Raw elements of one float type as another; the finite values that become Inf are kept for `take_lost`."""
        return cast(values, source, target, self._lost)

    def _pick(
        self, span: np.ndarray[Any, Any], stored: DType, piece: Piece, dtype: DType, out: np.ndarray[Any, Any]
    ) -> None:
        """Copy the elements of a piece, all of which are in `span`, to their places in `out`."""
        values = _strided(span, 0, [(n, s) for n, s, _ in piece.axes])
        if stored != dtype:
            values = self.cast(values, stored, dtype)
        _strided(out, piece.at, [(n, t) for n, _, t in piece.axes])[...] = values

    def _read(
        self,
        cells: Cells,
        starts: Iterable[tuple[int, int]],
        length: int,
        out: np.ndarray[Any, Any],
        windows: Windows | None = None,
    ) -> None:
        """Read `length` elements from each start to their place in `out`, and note them in the ledger."""
        size, memory = cells.dtype.itemsize, out.view(np.uint8).data
        nbytes = length * size
        places = ((start * size, memory[at * size : at * size + nbytes]) for start, at in starts)
        storage, noted = cells.storage, list(places)
        if windows:
            windows.read(self._files, storage, noted)
        else:
            self._files.read(storage.path, ((storage.offset + begin, part) for begin, part in noted))
        if self._ledger and self._ledger.counts(storage):
            join(self._passed, self._ledger.record(storage, noted))

    def take_passed(self) -> Passed:
        """What this thread has added to the ledger since the last call."""
        passed, self._passed = self._passed, {}
        return passed

    def take_lost(self) -> Overflows:
        """The finite values that casts have made infinite since the last call."""
        lost, self._lost = self._lost, Overflows()
        return lost


class _GathererInputs(NamedTuple):
    """How a computed source reads its inputs: by a gatherer, in at most `limit` bytes."""

    gatherer: Gatherer
    limit: int

    def __call__(self, tensor: Tensor, begin: int, end: int) -> np.ndarray[Any, Any]:
        return self.gatherer.read(tensor, begin, end, self.limit)

    def cast(self, values: np.ndarray[Any, Any], source: DType, target: DType) -> np.ndarray[Any, Any]:
        return self.gatherer.cast(values, source, target)


def contiguous_run(piece: Piece) -> int:
    """How many elements of a piece are contiguous in both its source and its target."""
    return piece.axes[-1][0] if piece.axes and piece.axes[-1][1:] == (1, 1) else 1


def _starts(first: int, second: int, axes: Sequence[Axis]) -> Iterable[tuple[int, int]]:
    """Offsets in source and target, from `first` and `second` on, of something that repeats along `axes`."""
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


def packed_piece(piece: Piece, gap: int) -> tuple[Piece, int, list[Axis]]:
    """A piece as it is in memory, from offset 0, without the gaps of more than `gap` elements in its source.

    Also returns the elements per read, and the axes along which such reads repeat: (count, step in the source, step in
    memory).
    """
    axes, repeats = list(piece.axes), list[Axis]()
    end = length = 1
    for i in sorted(range(len(axes)), key=lambda i: axes[i][1]):  # from the innermost axis of the source
        count, source, target = axes[i]
        if repeats or source - length > gap:
            repeats.append((count, source, end))
            axes[i] = (count, end, target)
            end *= count
        else:
            end = length = length + (count - 1) * source
    return Piece(piece.source, 0, piece.at, tuple(axes)), length, repeats


def _halves(piece: Piece) -> tuple[Piece, Piece]:
    """Cut a piece in two along the axis with the longest extent in the source."""
    axis = max(range(len(piece.axes)), key=lambda i: (piece.axes[i][0] - 1) * piece.axes[i][1])
    count, source, target = piece.axes[axis]
    half = count // 2

    def part(size: int, first: int) -> Piece:
        kept = [(size, source, target)] if size > 1 else []
        axes = (*piece.axes[:axis], *kept, *piece.axes[axis + 1 :])
        return Piece(piece.source, piece.start + first * source, piece.at + first * target, axes)

    return part(half, 0), part(count - half, half)


def _strided(array: np.ndarray[Any, Any], first: int, axes: list[tuple[int, int]]) -> np.ndarray[Any, Any]:
    """The elements of a flat array from `first` at (count, stride) `axes`."""
    shape = [n for n, _ in axes]
    return as_strided(array[first:], shape, [stride * array.itemsize for _, stride in axes])


def crc_problem(storage: Storage, tensor: str | None) -> Problem:
    """The error for a storage whose bytes have changed since they were written."""
    return Problem(
        "checksum-mismatch",
        "the bytes of a tensor changed since they were written",
        tensor=tensor,
        file=storage.path,
        rule="the CRC32 that the file records",
        expected=f"{storage.crc32:08x} over {storage.nbytes} bytes from byte {storage.offset}",
        remedy="copy the file again from where it was written; a disk or a transfer damaged it",
    )


def check_sums(ledger: Ledger, names: Mapping[Storage, str]) -> None:
    """Raise ReshardError for each storage whose bytes do not have the recorded CRC32."""
    raise_all(crc_problem(storage, names.get(storage)) for storage in ledger.settle())
