"""Products of matrices while address space is limited: OpenBLAS ends the process when it cannot allocate its buffer."""

from __future__ import annotations

from threading import Condition
from typing import Any

import numpy as np

from reshard.base.address_space import can_reserve

BLAS_BUFFER_BYTES = 40 << 20
"""Address space in bytes for the first buffer of OpenBLAS: 32 MiB, and a margin. Little of it becomes resident memory
(`BLAS_COPY_BYTES`).
"""

CONCURRENT_FREE_BYTES = 512 << 20
"""Free address space in bytes with which another product may run concurrently. OpenBLAS allocates its buffer after the
check, when other threads may have allocated theirs, and ends the process if it cannot.
"""

Floats = np.ndarray[Any, Any]


class Multiplier:
    """Multiplies matrices, as many at a time as there is address space for: OpenBLAS ends the process without it."""

    def __init__(self) -> None:
        self._free = Condition()
        self._buffers = self._used = 0

    def __call__(self, left: Floats, right: Floats) -> Floats:
        """`left` times `right`. Raises MemoryError if there is no room for a single buffer."""
        with self._free:
            while self._used == self._buffers and not self._has_more():
                self._free.wait()
            self._used += 1
        try:
            product: Floats = left @ right
        finally:
            with self._free:
                self._used -= 1
                self._free.notify()
        return product

    def prepare(self) -> None:
        """Allocate the first buffer, before threads compete for memory. Raises MemoryError if there is no room."""
        with self._free:
            if not self._buffers:
                self._has_more()

    def _has_more(self) -> bool:
        """Whether there is room for another buffer, which is then added. The first one is allocated here."""
        if self._buffers:
            if not can_reserve(CONCURRENT_FREE_BYTES):
                return False
        elif can_reserve(BLAS_BUFFER_BYTES):
            square = np.ones((256, 256), np.float32)
            square @ square  # large enough to need a buffer
        else:
            raise MemoryError(f"{BLAS_BUFFER_BYTES:,} bytes of address space to multiply matrices in")
        self._buffers += 1
        return True


multiplied = Multiplier()
