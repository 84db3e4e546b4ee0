"""Compare tensors element by element in small windows, wherever their elements lie."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from reshard.checkpoint import Cells, Replica, Tensor
from reshard.dtypes import DType
from reshard.errors import Problem
from reshard.gather import RAW, Files, Gatherer, Ledger, as_float, castable
from reshard.storage import Storage
from reshard.views import View

WINDOW = 4 << 20


class Difference(NamedTuple):
    """How many elements differ, and by how much at most (NaN where one side is NaN)."""

    elements: int
    largest: float


class Comparer:
    """Reads two tensors side by side. `ledger` collects the checksums of what passes."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._files = Files()
        self._sides = [Gatherer(self._files, ledger, WINDOW) for _ in range(2)]

    def close(self) -> None:
        self._files.close()

    def difference(self, first: Tensor, second: Tensor) -> Difference | None:
        """What differs between two tensors of one dtype and shape, bit for bit; None if nothing does."""
        size = first.dtype.itemsize
        step = WINDOW // size
        elements, largest = 0, 0.0
        for begin in range(0, first.view.numel, step):
            count = min(step, first.view.numel - begin)
            a, b = (
                self._window(side, tensor, begin, count)
                for side, tensor in zip(self._sides, (first, second), strict=True)
            )
            if not np.array_equal(a, b):
                unequal = a != b
                elements += int(unequal.sum())
                largest = max(largest, _gap(a[unequal], b[unequal], first.dtype), key=_nan_last)
        return Difference(elements, largest) if elements else None

    def _window(self, side: Gatherer, tensor: Tensor, begin: int, count: int) -> np.ndarray[Any, Any]:
        out = np.empty(count, RAW[tensor.dtype.itemsize])
        side.fill(tensor.view.window(begin, begin + count), tensor.dtype, out)
        return out


def _nan_last(value: float) -> tuple[bool, float]:
    return value != value, value


def _gap(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], dtype: DType) -> float:
    if not castable(dtype):
        return float("nan")
    with np.errstate(invalid="ignore"):
        gap = np.abs(as_float(a, dtype).astype(np.float64) - as_float(b, dtype).astype(np.float64))
    return float(gap.max())


def unequal_replicas(replicas: list[Replica]) -> list[Problem]:
    """Problems of tensors that are stored more than once with different values."""
    comparer = Comparer()
    try:
        return [_problem(replica) for replica in replicas if not _equal(comparer, replica)]
    finally:
        comparer.close()


def _equal(comparer: Comparer, replica: Replica) -> bool:
    first, second = replica.first, replica.second
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    ours, theirs = _storage(first.view), _storage(second.view)
    if ours and theirs and (ours == theirs or None not in (ours.crc32, theirs.crc32)):
        return ours.crc32 == theirs.crc32
    return comparer.difference(first, second) is None


def _storage(view: View) -> Storage | None:
    """The storage that a view shows from end to end, if it is just one."""
    if len(view.pieces) != 1 or not isinstance(view.pieces[0].source, Cells):
        return None
    piece, cells = view.pieces[0], view.pieces[0].source
    whole = piece.start == 0 and view.numel * cells.dtype.itemsize == cells.storage.nbytes
    in_order = all(source == target for _, source, target in piece.axes)
    return cells.storage if whole and in_order else None


def _problem(replica: Replica) -> Problem:
    return Problem(
        "a tensor is stored twice, with different values",
        tensor=replica.tensor,
        file=replica.second.file,
        rule=replica.rule,
        expected=f"the values in {replica.first.file}",
        remedy=replica.remedy,
    )
