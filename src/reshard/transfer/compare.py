"""Compare tensors element by element in small windows, whatever their layout in files."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from operator import itemgetter
from threading import Event
from typing import Any, NamedTuple

import numpy as np

from reshard.algebra.dtypes import BY_NAME, DType, castable
from reshard.algebra.storage import Storage
from reshard.algebra.tensors import Cells, Replica, Tensor
from reshard.base.errors import Problem
from reshard.base.merged_problems import one_for_each_file
from reshard.stores import MAX_REQUEST_BYTES, is_remote
from reshard.transfer.elements import Overflows, as_float, cast
from reshard.transfer.gather import Gatherer
from reshard.transfer.ledger import Ledger
from reshard.transfer.memory_budget import ThreadShare
from reshard.transfer.thread_files import OpenFiles
from reshard.transfer.threads import taken, together

WINDOW_BYTES = 1 << 20
"""Most bytes compared at a time: small enough for the cache of a core, together with what they are cast from."""

FEW_ELEMENTS = 1 << 12
"""Elements compared first of two tensors that must differ, which are nearly always enough."""

BYTES_EACH = 32
"""Bytes of memory for each byte compared: both sides, masks, and the differences as float64."""


Elements = np.ndarray[Any, Any]


class ElementDifference(NamedTuple):
    """How many elements differ, the largest difference (NaN if one side is NaN), and the first element that differs."""

    elements: int
    largest: float
    first: int


class RoundingDifference(NamedTuple):
    """How the values of two tensors of different dtypes differ.

    `rounded_to` is the dtype of one of them, if rounding the other one to it gives the same values.
    """

    elements: int
    largest: float
    rounded_to: DType | None


NOT_COUNTED = ElementDifference(0, float("nan"), 0)


class Distance:
    """The distance of two tensors as Σ(a-b)² and Σa², summed over windows of both."""

    def __init__(self) -> None:
        self.moved = self.norm = 0.0

    def add(self, first: Elements, second: Elements, dtype: DType) -> None:
        """Add a window. Elements that are not floats add nothing."""
        if castable(dtype):
            before = as_float(first, dtype).astype(np.float64)
            with np.errstate(invalid="ignore", over="ignore"):
                gap = before - as_float(second, dtype)
                self.moved += float(np.dot(gap, gap))
                self.norm += float(np.dot(before, before))


class Comparer:
    """Reads two tensors in parallel until `stopped`. `ledger` collects the checksums of the bytes read.

    It uses the memory of one thread of `share`.
    """

    def __init__(self, stopped: Event, share: ThreadShare, ledger: Ledger | None = None) -> None:
        self._stopped = stopped
        self._files = OpenFiles()
        self._gatherer = Gatherer(self._files, ledger, share.gathering)
        self._size = min(WINDOW_BYTES, share.wide // BYTES_EACH)
        self._far = min(MAX_REQUEST_BYTES, share.wide // 4)

    def close(self) -> None:
        self._files.close()

    def difference(
        self, first: Tensor, second: Tensor, *, any_nan: bool = False, measure: Distance | None = None
    ) -> ElementDifference | None:
        """The bitwise difference between two tensors of the same dtype and shape; None if there is none.

        With `any_nan`, all NaNs are equal: processors round to different ones. `measure` accumulates the distance.
        """
        elements, largest, at = 0, 0.0, 0
        for begin, a, b in self._windows(first, second):
            if measure:
                measure.add(a, b, first.dtype)
            if np.array_equal(a, b):
                continue
            unequal = _unequal(a, b, first.dtype) if any_nan else a != b
            if count := int(unequal.sum()):
                at = at if elements else begin + int(unequal.argmax())
                elements += count
                largest = max(largest, _gap(a[unequal], b[unequal], first.dtype), key=_nan_last)
        return ElementDifference(elements, largest, at) if elements else None

    def differ(self, first: Tensor, second: Tensor) -> bool:
        """Whether two tensors of the same dtype and shape differ. Reads no further than to the first difference."""
        few = min(FEW_ELEMENTS, first.view.numel)
        ours, theirs = (self._gatherer.read(tensor, 0, few) for tensor in (first, second))
        if not np.array_equal(ours, theirs):
            return True
        return any(not np.array_equal(a, b) for _, a, b in self._windows(first, second))

    def gap(
        self, first: Tensor, second: Tensor, *, measure: Distance | None = None
    ) -> RoundingDifference | None:
        """How the values of two tensors of different dtypes and the same shape differ; None if they do not.

        All NaNs are equal. `measure` accumulates the distance.
        """
        kinds = (first.dtype, second.dtype)
        common = BY_NAME["float64" if BY_NAME["float64"] in kinds else "float32"]
        elements, largest = 0, 0.0
        fits_first = fits_second = True
        for _, a, b in self._windows(first, second):
            left, right = (
                cast(each, kind, common, Overflows()) for each, kind in zip((a, b), kinds, strict=True)
            )
            if measure:
                measure.add(left, right, common)
            unequal = _unequal(left, right, common)
            if count := int(unequal.sum()):
                elements += count
                largest = max(largest, _gap(left[unequal], right[unequal], common), key=_nan_last)
                fits_second = fits_second and _rounds(a, b, *kinds)
                fits_first = fits_first and _rounds(b, a, *reversed(kinds))
        if not elements:
            return None
        rounded_to = first.dtype if fits_first else None
        if fits_second:
            rounded_to = second.dtype
        return RoundingDifference(elements, largest, rounded_to)

    def _windows(self, first: Tensor, second: Tensor) -> Iterator[tuple[int, Elements, Elements]]:
        """Windows of both tensors to compare, each with the index of its first element.

        A store is read in requests as large as those of `convert`, since each costs a round trip.
        """
        itemsize = max(first.dtype.itemsize, second.dtype.itemsize)
        step = compared = self._size // itemsize
        if is_remote(first.file) or is_remote(second.file):
            # Half of the memory is for reading, the other half for comparing.
            step, compared = self._far // itemsize, max(1, compared // 2)
        for begin in range(0, first.view.numel, step):
            end = min(begin + step, first.view.numel)
            if self._stopped.is_set():
                return
            a, b = (self._gatherer.read(tensor, begin, end) for tensor in (first, second))
            self._gatherer.take_passed()  # the ledger has these ranges, and no journal needs them
            for low in range(0, end - begin, compared):
                yield begin + low, a[low : low + compared], b[low : low + compared]


def _unequal(first: Elements, second: Elements, dtype: DType) -> Elements:
    """Which elements differ, where all NaNs are equal."""
    unequal: Elements = first != second
    if castable(dtype):
        unequal &= ~(np.isnan(as_float(first, dtype)) & np.isnan(as_float(second, dtype)))
    return unequal


def _rounds(elements: Elements, wanted: Elements, dtype: DType, target: DType) -> bool:
    """Whether rounding what is `elements` from `dtype` to `target` gives what is `wanted`, and no finite value Inf."""
    lost = Overflows()
    rounded = cast(elements, dtype, target, lost)
    return lost.overflow is None and not _unequal(rounded, wanted, target).any()


def _nan_last(value: float) -> tuple[bool, float]:
    return value != value, value


def _gap(first: Elements, second: Elements, dtype: DType) -> float:
    """The largest difference of two elements; NaN if they are not floats."""
    if not castable(dtype):
        return float("nan")
    with np.errstate(invalid="ignore"):
        gap = np.abs(as_float(first, dtype).astype(np.float64) - as_float(second, dtype).astype(np.float64))
    return float(gap.max())


def unequal_replicas(replicas: Sequence[Replica], share: ThreadShare) -> list[Problem]:
    """Problems of tensors that are stored more than once with different values, one for each file."""

    if not replicas:
        return []
    waiting = deque(enumerate(replicas))

    def work(worker: int, stopped: Event) -> list[tuple[int, Problem]]:
        problems = []
        with closing(Comparer(stopped, share)) as comparer:
            for index, replica in taken(waiting, stopped):
                difference = _replica_difference(comparer, replica)
                if (difference is None) != replica.equal:
                    problems.append((index, _problem(replica, difference)))
        return problems

    problems = sorted((each for part in together(work, share.threads) for each in part), key=itemgetter(0))
    return one_for_each_file(problem for _, problem in problems)


def _replica_difference(comparer: Comparer, replica: Replica) -> ElementDifference | None:
    """The difference; without counts if shapes or checksums differ, or if the two must differ."""
    first, second = replica.first, replica.second
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return NOT_COUNTED
    ours, theirs = _storage(first), _storage(second)
    if ours and theirs and (ours == theirs or None not in (ours.crc32, theirs.crc32)):
        return None if ours.crc32 == theirs.crc32 else NOT_COUNTED
    if not replica.equal:
        return NOT_COUNTED if comparer.differ(first, second) else None
    return comparer.difference(first, second, any_nan=True)


def _storage(tensor: Tensor) -> Storage | None:
    """The storage whose bytes are exactly those of a tensor; None if there is not exactly one."""
    view = tensor.view
    if len(view.pieces) != 1 or not isinstance(view.pieces[0].source, Cells):
        return None
    piece, cells = view.pieces[0], view.pieces[0].source
    whole = piece.start == 0 and view.numel * cells.dtype.itemsize == cells.storage.nbytes
    in_order = all(source == target for _, source, target in piece.axes)
    return cells.storage if whole and in_order and cells.dtype == tensor.dtype else None


def _problem(replica: Replica, different: ElementDifference | None) -> Problem:
    at, count = different.first if different else 0, replica.first.view.numel
    files = [tensor.file_of(at) for tensor in (replica.first, replica.second)]
    found = None
    if different and different.elements:
        found = f"{different.elements} of {count} elements differ, the first is element {at}"
    elif not different and files[0] != files[1]:
        found = f"the same values as in {files[0]}"
    return Problem(
        replica.code,
        replica.message,
        tensor=replica.tensor,
        file=files[1],
        rule=replica.rule,
        expected=f"the values in {files[0]}" if different and files[0] != files[1] else None,
        found=found,
        remedy=replica.remedy,
    )
