"""Parts of a weight that is quantized in groups of consecutive elements, computed some groups at a time."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from reshard.algebra.tensors import MIN_READ_ELEMENTS, Computed, InputReader, Tensor
from reshard.codecs.block_grid import Floats
from reshard.codecs.not_finite import not_finite
from reshard.transfer.elements import RAW_DTYPES, as_float


class EncodedGroups(Computed):
    """A part of a weight [..., rows, columns] with `per_group` items for each `group` of elements.

    `name` is that of the weight, and `method` that of the quantization, for messages; `step` elements are computed at
    a time.
    """

    method: str
    step: int
    per_group = 1

    def __init__(self, name: str, weight: Tensor, group: int) -> None:
        self.inputs = (weight,)
        self._name, self._group = name, group

    @property
    def few(self) -> int:
        return max(1, MIN_READ_ELEMENTS // self._group) * self.per_group

    def values(self, begin: int, end: int, read: InputReader) -> Floats:
        group, each, weight = self._group, self.per_group, self.inputs[0]
        first, last = begin // each, -(-end // each)
        raw = read(weight, first * group, last * group).reshape(-1, group)
        out = np.empty((last - first, each), RAW_DTYPES[self.dtype.itemsize])
        step = max(1, self.step // group)
        for low in range(0, last - first, step):
            floats = as_float(raw[low : low + step], weight.dtype).astype(np.float32, copy=False)
            if not np.isfinite(floats).all():
                raise not_finite(self._name, weight, self.method)
            out[low : low + step] = self._items(floats, read)
        return out.reshape(-1)[begin - first * each : end - first * each]

    @abstractmethod
    def _items(self, floats: Floats, read: InputReader) -> Floats:
        """The items of some groups [groups, group]."""
