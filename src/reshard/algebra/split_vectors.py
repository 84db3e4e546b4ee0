"""Vectors that ranks store in parts, such as the partitions and buffers of optimizers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from reshard.algebra.dtypes import BY_NAME
from reshard.algebra.storage import StoredTensor
from reshard.algebra.tensors import Cells
from reshard.algebra.views import Piece


class SplitVector:
    """Several vectors, read as one concatenated vector."""

    def __init__(self, parts: Sequence[StoredTensor]) -> None:
        self.dtype = parts[0].dtype if parts else BY_NAME["float32"]
        self._parts = parts
        self._cells = [Cells(part.storage, part.dtype) for part in parts]
        self._ends = list(accumulate(part.numel for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def cut(self, begin: int, end: int, to: int = 0) -> Iterator[Piece]:
        """Elements `begin` to `end`, as pieces of a view, placed from `to` on."""
        index = bisect_right(self._ends, begin)
        while begin < end:
            part, stop = self._parts[index], min(end, self._ends[index])
            start = part.start + begin - (self._ends[index] - part.numel)
            axes = ((stop - begin, 1, 1),) if stop - begin > 1 else ()
            yield Piece(self._cells[index], start, to, axes)
            to, begin, index = to + stop - begin, stop, index + 1
