"""Where the bytes of a tensor are on disk; nothing is read."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from reshard.algebra.dtypes import DType


@dataclass(frozen=True, slots=True)
class Storage:
    """`nbytes` bytes of the file `path` from `offset`; `crc32` if the container recorded one."""

    path: str
    offset: int
    nbytes: int
    crc32: int | None = None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A strided tensor in a storage: `start` and `strides` count elements, and axes are in row-major order."""

    storage: Storage
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize
