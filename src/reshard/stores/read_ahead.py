"""Fetch bytes of files in stores before they are read: many requests take hardly longer than one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from reshard.stores.path import is_remote
from reshard.stores.registry import at
from reshard.stores.remote_file import MAX_HEADS_BYTES, MIN_READ_BYTES, RemoteFile, pool, side_by_side
from reshard.stores.store import Store

Range = tuple[str, int, int]
"""A file, and the begin and end of a range of its bytes."""


def fetch_heads(paths: Iterable[Path]) -> None:
    """Fetch the beginning of each file that is in a store, many at a time, for when it is opened."""
    urls = [str(path) for path in paths if is_remote(path)]

    def fetch(url: str) -> None:
        place = at(url)
        entry = place.entry(url)
        if entry and not entry.is_folder and url not in place.heads:
            content = RemoteFile(url, entry, place).read(0, min(MIN_READ_BYTES, MAX_HEADS_BYTES // len(urls)))
            place.heads[url] = [(0, content)]

    list(pool().map(fetch, urls))


def fetch_ahead(ranges: Iterable[Range]) -> None:
    """Fetch many small ranges of files in stores at once. Each is then read once, with exactly these bounds.

    A range outside of its file is left to its reader. Files on disks are ignored.
    """
    wanted: dict[str, set[Range]] = {}
    for each in ranges:
        if is_remote(each[0]):
            wanted.setdefault(each[0], set()).add(each)
    room: list[tuple[Store, Range, bytearray]] = []
    requests: list[Callable[[], object]] = []
    for url, those in wanted.items():
        place = at(url)
        entry = place.entry(url)
        if entry is None or entry.is_folder:
            continue
        inside = [each for each in those - place.ahead.keys() if 0 <= each[1] < each[2] <= entry.size]
        mine = [(place, each, bytearray(each[2] - each[1])) for each in inside]
        requests += RemoteFile(url, entry, place).filling((each[1], memoryview(out)) for _, each, out in mine)
        room += mine
    side_by_side(requests)
    for place, each, out in room:
        place.ahead[each] = bytes(out)
