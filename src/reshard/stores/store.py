"""The content of a store, asked once: one listing below each typed URL answers everything that readers ask of paths.

Each question costs a round trip, and money, and readers ask hundreds: is there a `model.safetensors`, an
index, a `.metadata`. A listing is also one state of the store, so all answers are consistent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from threading import RLock
from typing import TYPE_CHECKING, NamedTuple

from reshard.stores.address import Address, parsed

if TYPE_CHECKING:
    from reshard.stores.ranges import Wanted


class Entry(NamedTuple):
    """A file or folder as a store reports it; `modified` is in nanoseconds, 0 if unknown."""

    size: int = 0
    modified: int = 0
    identity: str = ""
    """The version, ETag or commit: it changes with the bytes."""
    is_folder: bool = False


FOLDER = Entry(is_folder=True)


class Store(ABC):
    """One bucket, repository or web server. All paths in it begin with `url`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._listed: dict[str, Listing | None] = {}
        self._outside: dict[str, Entry | None] = {}
        self._children: dict[str, list[str]] = {}
        """The names in folders outside all typed URLs, as the folder of a typed file is."""
        self._lock = RLock()
        self.heads: dict[str, list[tuple[int, bytes]]] = {}
        """The first bytes of files, kept until the store is listed again."""
        self.ahead: dict[tuple[str, int, int], bytes] = {}
        """Bytes fetched before they are read, by file, begin and end. Reading them removes them."""

    def begin(self, typed: Address) -> None:
        """Make the next question about anything below a typed URL list it, whatever was known."""
        with self._lock:
            self._listed[typed.shown] = None
            self._forget()

    def refresh(self) -> None:
        """Forget what was listed, so that later answers reflect the state at that time."""
        with self._lock:
            self._listed = dict.fromkeys(self._listed)
            self._forget()

    def _forget(self) -> None:
        for kept in (self._outside, self._children, self.heads, self.ahead):
            kept.clear()

    def entry(self, url: str) -> Entry | None:
        """The file or folder at `url`, or None. Raises ReshardError if the store does not answer."""
        with self._lock:
            if listing := self._listing(url):
                return listing.entries.get(url)
            above = (root for root in self._listed if root.startswith(url + "/"))
            if any((found := self._listed[root]) and found.entries for root in above):
                return FOLDER
            if url not in self._outside:
                self._outside[url] = self._look(url)
            return self._outside[url]

    def children(self, url: str) -> list[str]:
        """The names in the folder `url`, sorted."""
        with self._lock:
            if listing := self._listing(url):
                return sorted(listing.children.get(url, ()))
            if url not in self._children:
                found = self._find(url, deep=False)
                self._children[url] = sorted({each[len(url) + 1 :].split("/")[0] for each in found})
            return self._children[url]

    def _listing(self, url: str) -> Listing | None:
        """The listing that covers `url`, made now if necessary; None if no typed URL does."""
        for root in self._listed:
            if url == root or url.startswith(root + "/"):
                found = self._listed[root]
                if found is None:
                    found = self._listed[root] = Listing(root, self._find(root, deep=True))
                return found
        return None

    @abstractmethod
    def _find(self, root: str, *, deep: bool) -> dict[str, Entry]:
        """All files at or below `root`, by URL; without `deep`, the files and folders directly in it."""

    @abstractmethod
    def _look(self, url: str) -> Entry | None:
        """The entry at a single URL; None if there is nothing."""

    @abstractmethod
    def fetch(self, wanted: Wanted) -> bytes:
        """A range of bytes of a file, in one request. Raises ReshardError for those of another range or version."""


class Listing:
    """Files below one URL, and the folders implied by their names."""

    def __init__(self, root: str, files: dict[str, Entry]) -> None:
        self.entries = dict(files)
        self.children: dict[str, set[str]] = {}
        for url in files:
            while url != root:
                folder, _, name = url.rpartition("/")
                self.children.setdefault(folder, set()).add(name)
                self.entries.setdefault(folder, FOLDER)
                url = folder


_stores: dict[str, Store] = {}
_lock = RLock()


def connect(typed: str) -> str:
    """Have everything below a typed URL listed when it is next asked for. Returns the URL as it may be shown."""
    from reshard.stores.kinds import make

    place = parsed(typed)
    made = make(place)
    with _lock:
        before = _stores.get(made.url)
        if before is None or type(before) is not type(made):
            before = _stores[made.url] = made
        before.begin(place)
    return place.shown


def at(url: str) -> Store:
    """The store that contains a path."""
    with _lock:
        found = _known(url)
        if found is None:
            from reshard.stores.kinds import make

            made = make(parsed(url))
            found = _stores[made.url] = made
        return found


def refresh(urls: Iterable[str]) -> None:
    """Make the stores of some paths report their present state from now on."""
    for each in {id(found): found for found in map(at, urls)}.values():
        each.refresh()


def _known(url: str) -> Store | None:
    parts = url.split("/")
    prefixes: Iterable[str] = ("/".join(parts[:end]) for end in range(len(parts), 2, -1))
    return next((_stores[prefix] for prefix in prefixes if prefix in _stores), None)
