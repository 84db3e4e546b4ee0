"""Files of stores, read in ranges: few, large and parallel requests, retried when the network fails.

A request costs a round trip, which takes longer than reading a megabyte. So nearby parts share one request, parts
larger than a request are fetched by several in parallel, and small reads at either end of a file, where headers are,
share one.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from threading import Lock
from typing import NamedTuple, TypeVar

from reshard.stores.file_info import FileInfo, Stamp
from reshard.stores.open_file import OpenFile
from reshard.stores.range_responses import RangeRequest
from reshard.stores.store import Store
from reshard.stores.store_errors import retry

MAX_GAP_BYTES = 1 << 20
"""Two parts with more unused bytes than this between them are read in separate requests."""

MAX_REQUEST_BYTES = 8 << 20
"""Most bytes of one request."""

CONNECTIONS = 16
"""Most requests at a time."""

MIN_READ_BYTES = 64 << 10
"""Least bytes of a small read, since headers are read in several steps."""

READS_KEPT = 8
"""Number of small reads whose bytes a file keeps."""

MAX_HEADS_BYTES = 64 << 20
"""Most bytes of file beginnings that are kept for when the files are opened."""

T = TypeVar("T")

FilePart = tuple[int, memoryview]
"""An offset in a file, and the memory to fill from there."""

_pools: dict[int, ThreadPoolExecutor] = {}
_lock = Lock()


class RemoteStore(Store):
    """A store on other machines, whose files are read in ranges."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.heads: dict[str, list[tuple[int, bytes]]] = {}
        """The first bytes of files, kept until the store is listed again."""
        self.ahead: dict[tuple[str, int, int], bytes] = {}
        """Bytes fetched before they are read, by file, begin and end. Reading them removes them."""

    def _forget(self) -> None:
        super()._forget()
        self.heads.clear()
        self.ahead.clear()

    def opened(self, url: str, entry: FileInfo) -> OpenFile:
        return RemoteFile(url, entry, self)

    @abstractmethod
    def fetch(self, wanted: RangeRequest) -> bytes:
        """A range of bytes of a file, in one request. Raises ReshardError for those of another range or version."""


class RemoteFile(OpenFile):
    """A file of a store."""

    def __init__(self, url: str, entry: FileInfo, store: RemoteStore) -> None:
        self._url, self._entry, self.store = url, entry, store
        self._kept = list(self.store.heads.get(url, ()))
        """Bytes received already, with their offsets: headers are read in several steps."""

    def stamp(self) -> Stamp:
        return self._entry.stamp()

    def read(self, at: int, count: int) -> bytes:
        end = min(at + count, self.size)
        if end <= at:
            return b""
        if ahead := self.store.ahead.pop((self._url, at, end), None):
            return ahead
        begin, content = next(
            (
                (at, kept[at - first : end - first])
                for first, kept in self._kept
                if first <= at < first + len(kept)
            ),
            (at, b""),
        )
        begin += len(content)
        if begin == end:
            return content
        reach = min(max(end, begin + MIN_READ_BYTES), self.size)
        if reach - begin > MIN_READ_BYTES:
            ranges = [
                (first, min(first + MAX_REQUEST_BYTES, end)) for first in range(begin, end, MAX_REQUEST_BYTES)
            ]
            return content + b"".join(run_in_parallel([partial(self._fetch, *each) for each in ranges]))
        more = self._fetch(begin, reach)
        self._kept = [*self._kept[-READS_KEPT:], (begin, more)]
        if begin == 0 and len(self.store.heads) < MAX_HEADS_BYTES // MIN_READ_BYTES:
            self.store.heads[self._url] = [(0, more)]
        return content + more[: end - begin]

    def fill(self, parts: Iterable[FilePart]) -> int | None:
        parts = list(parts)
        if (end := max((offset + len(out) for offset, out in parts), default=0)) > self.size:
            return end
        run_in_parallel(self.fill_requests(parts))
        return None

    def fill_requests(self, parts: Iterable[FilePart]) -> list[Callable[[], object]]:
        """Functions that fill the memory of `parts`, all of which are inside the file: one for each request."""
        return [partial(self._fill, group) for group in _grouped_parts(sorted(parts, key=itemgetter(0)))]

    def _fill(self, group: _MergedRange) -> None:
        content = self._fetch(group.begin, group.end)
        for offset, out in group.parts:
            out[:] = content[offset - group.begin : offset - group.begin + len(out)]

    def _fetch(self, begin: int, end: int) -> bytes:
        with self.store.read_errors(self._url):
            return retry(lambda: self._once(begin, end))

    def _once(self, begin: int, end: int) -> bytes:
        wanted = RangeRequest(self._url, begin, end, self._entry)
        content = self.store.fetch(wanted)
        wanted.check_length(self.size, len(content))
        return content


class _MergedRange(NamedTuple):
    """What one request fetches."""

    begin: int
    end: int
    parts: list[FilePart]


def _grouped_parts(parts: Iterable[FilePart]) -> Iterator[_MergedRange]:
    """Parts grouped by request, each group with its begin and end. Longer parts are cut."""
    begin, end, members = 0, 0, list[FilePart]()
    for offset, out in _cut_parts(parts):
        reach = max(end, offset + len(out))
        if members and (offset - end > MAX_GAP_BYTES or reach - begin > MAX_REQUEST_BYTES):
            yield _MergedRange(begin, end, members)
            members = []
        if not members:
            begin, end = offset, offset
        members.append((offset, out))
        end = max(end, offset + len(out))
    if members:
        yield _MergedRange(begin, end, members)


def _cut_parts(parts: Iterable[FilePart]) -> Iterator[FilePart]:
    for offset, out in parts:
        for at in range(0, len(out), MAX_REQUEST_BYTES):
            yield offset + at, out[at : at + MAX_REQUEST_BYTES]


def run_in_parallel(requests: Sequence[Callable[[], T]]) -> list[T]:
    """The results of requests, many of them made at a time."""
    if len(requests) == 1:
        return [requests[0]()]
    return list(pool().map(lambda request: request(), requests))


def pool() -> ThreadPoolExecutor:
    """The threads of this process that wait for stores: a fork has none of its parent's."""
    with _lock:
        if os.getpid() not in _pools:
            _pools[os.getpid()] = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="reshard-store")
        return _pools[os.getpid()]
