"""Tensors read before they are needed: threads fill them in parts, and they are handed out in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock, local
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from reshard.algebra.tensors import Tensor
from reshard.base.errors import ReshardError
from reshard.transfer.elements import RAW_DTYPES, Overflow, count_nonfinite, overflow_problem
from reshard.transfer.gather import Gatherer
from reshard.transfer.ledger import Ledger
from reshard.transfer.memory_budget import ThreadShare
from reshard.transfer.thread_files import OpenFiles

PART_BYTES = 16 << 20
"""Bytes of a tensor that one thread reads at a time."""

Array = np.ndarray[Any, Any]


class WantedTensor(NamedTuple):
    """A tensor to read, and optionally where to: the memory of its elements, as integers of their width."""

    name: str
    tensor: Tensor
    out: Array | None = None


def read_ahead(
    wanted: Iterable[WantedTensor],
    share: ThreadShare,
    ledger: Ledger | None,
    most_bytes: int,
    on_read: Callable[[int], None] = lambda nbytes: None,
) -> Iterator[tuple[str, Array]]:
    """The raw elements of each tensor by name, in order, read by the threads of `share`.

    The tensors that are being read or wait to be taken have at most `most_bytes` bytes together, or are a single one.
    `on_read` receives, at the end, the number of bytes that were read from files. Raises ReshardError if a file cannot
    be read, or if a finite value does not fit the dtype of its tensor.
    """
    with _ReaderThreads(share, ledger) as readers:
        coming: deque[_PendingTensor] = deque()
        for each in wanted:
            while coming and sum(other.nbytes for other in coming) + each.tensor.nbytes > most_bytes:
                yield readers.taken(coming.popleft())
            coming.append(readers.begun(each))
        while coming:
            yield readers.taken(coming.popleft())
        on_read(readers.read_bytes)


class _PendingTensor:
    """A tensor whose parts are being read."""

    def __init__(self, name: str, tensor: Tensor, out: Array, parts: list[Future[Overflow | None]]) -> None:
        self._name, self._tensor, self._out, self._parts = name, tensor, out, parts
        self.nbytes = tensor.nbytes

    def taken(self) -> tuple[str, Array]:
        """Its name and elements, once all are read. Raises ReshardError."""
        lost: Overflow | None = None
        for part in self._parts:
            overflow = part.result()
            lost = overflow.joined(lost) if overflow else lost
        if lost:
            raise ReshardError(overflow_problem(self._name, lost))
        return self._name, self._out.reshape(self._tensor.shape)


class _ReaderThreads:
    """Threads that read parts of tensors, each with files of its own."""

    def __init__(self, share: ThreadShare, ledger: Ledger | None) -> None:
        self._share, self._ledger = share, ledger
        self._pool = ThreadPoolExecutor(share.threads, thread_name_prefix="reshard")
        self._own = local()
        self._files: list[OpenFiles] = []
        self._lock = Lock()
        self._process = os.getpid()

    @property
    def read_bytes(self) -> int:
        """Bytes that all threads have read."""
        return sum(files.read_bytes for files in self._files)

    def begun(self, wanted: WantedTensor) -> _PendingTensor:
        """A tensor, all parts of which wait to be read."""
        name, tensor, out = wanted
        count, itemsize = tensor.view.numel, tensor.dtype.itemsize
        out = np.empty(count, RAW_DTYPES[itemsize]) if out is None else out
        row = max(1, count // max(1, tensor.shape[0])) if tensor.shape else 1
        step = max(1, PART_BYTES // itemsize // row) * row
        starts = range(0, count, step)
        parts = [self._pool.submit(self._read, tensor, at, min(at + step, count), out) for at in starts]
        return _PendingTensor(name, tensor, out, parts)

    def taken(self, coming: _PendingTensor) -> tuple[str, Array]:
        """The name and elements of a tensor, once they are read. Raises ReshardError, also in a forked process."""
        if os.getpid() != self._process:
            raise ReshardError(
                "stream-in-another-process",
                "a stream was continued in another process than the one that began it",
                rule="the threads that read do not exist in a forked process",
                remedy="call reshard.stream in the process that takes the tensors",
            )
        return coming.taken()

    def _read(self, tensor: Tensor, begin: int, end: int, out: Array) -> Overflow | None:
        """Read elements `begin` to `end` into their place in `out`; returns the finite values that are lost."""
        gatherer = self._gatherer()
        is_whole = end - begin == tensor.view.numel
        pieces = tensor.view.pieces if is_whole else tensor.view.window(begin, end)
        gatherer.fill(pieces, tensor.dtype, out[begin:end])
        gatherer.take_passed()  # the ledger has these ranges, and no journal needs them
        lost = gatherer.take_lost()
        return lost.of(count_nonfinite(out[begin:end], tensor.dtype)) if lost.overflow else None

    def _gatherer(self) -> Gatherer:
        gatherer: Gatherer | None = getattr(self._own, "gatherer", None)
        if gatherer is None:
            files = OpenFiles()
            with self._lock:
                self._files.append(files)
            gatherer = self._own.gatherer = Gatherer(files, self._ledger, self._share.gathering)
        return gatherer

    def __enter__(self) -> _ReaderThreads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        for files in self._files:
            files.close()
