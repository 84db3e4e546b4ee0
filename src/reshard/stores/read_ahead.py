"""Fetch bytes of files in stores before they are read: many requests take hardly longer than one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from reshard.stores.path import is_remote
from reshard.stores.registry import store_at
from reshard.stores.remote_file import (
    MAX_HEADS_BYTES,
    MIN_READ_BYTES,
    RemoteFile,
    RemoteStore,
    pool,
    run_in_parallel,
)

Range = tuple[str, int, int]
"""A file, and the begin and end of a range of its bytes."""


def fetch_heads(paths: Iterable[Path]) -> None:
    """Fetch the beginning of each file that is in a store, many at a time, for when it is opened."""
    urls = [str(path) for path in paths if is_remote(path)]

    def fetch(url: str) -> None:
        file = _remote_file(url)
        if file and url not in file.store.heads:
            content = file.read(0, min(MIN_READ_BYTES, MAX_HEADS_BYTES // len(urls)))
            file.store.heads[url] = [(0, content)]

    list(pool().map(fetch, urls))


def fetch_ahead(ranges: Iterable[Range]) -> None:
    """Fetch many small ranges of files in stores at once. Each is then read once, with exactly these bounds.

    A range outside of its file is left to its reader. Files on disks are ignored.
    """
    wanted: dict[str, set[Range]] = {}
    for each in ranges:
        if is_remote(each[0]):
            wanted.setdefault(each[0], set()).add(each)
    buffers: list[tuple[RemoteStore, Range, bytearray]] = []
    requests: list[Callable[[], object]] = []
    for url, of_file in wanted.items():
        file = _remote_file(url)
        if file is None:
            continue
        inside = [each for each in of_file - file.store.ahead.keys() if 0 <= each[1] < each[2] <= file.size]
        empty = [(file.store, each, bytearray(each[2] - each[1])) for each in inside]
        requests += file.fill_requests((each[1], memoryview(out)) for _, each, out in empty)
        buffers += empty
    run_in_parallel(requests)
    for store, each, out in buffers:
        store.ahead[each] = bytes(out)


def _remote_file(url: str) -> RemoteFile | None:
    """The file at a URL, if a store on other machines has it."""
    store = store_at(url)
    if not isinstance(store, RemoteStore):
        return None
    entry = store.entry(url)
    return RemoteFile(url, entry, store) if entry and not entry.is_folder else None
