"""The content of a store, asked once: one listing below each typed URL answers everything that readers ask of paths.

Each question costs a round trip, and money, and readers ask hundreds: is there a `model.safetensors`, an
index, a `.metadata`. A listing is also one state of the store, so all answers are consistent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from threading import RLock
from typing import ClassVar

from reshard.stores.address import Address, StoreKind
from reshard.stores.file_info import ANY_FOLDER, FileInfo
from reshard.stores.open_file import OpenFile
from reshard.stores.store_errors import read_errors


class Store(ABC):
    """One bucket, repository or web server. All paths in it begin with `url`: a scheme, and `depth` parts."""

    kind: ClassVar[StoreKind]
    depth: ClassVar[int] = 1

    @classmethod
    @abstractmethod
    def address(cls, url: str) -> Address:
        """The parts of a URL of this kind. Raises ReshardError if it names nothing."""

    @classmethod
    def containing(cls, place: Address) -> Store:
        """The store that contains an address."""
        return cls("/".join(place.url.split("/")[: 2 + cls.depth]))

    @classmethod
    def top(cls, url: str) -> int:
        """The number of parts, after the scheme, of the URL of the store that contains `url`."""
        return cls.depth

    @abstractmethod
    def opened(self, url: str, entry: FileInfo) -> OpenFile:
        """The file at `url`, open for reading. Raises OSError."""

    def read_errors(self, url: str) -> AbstractContextManager[None]:
        """Turns the errors of the package that opens the store into those of reshard; see `store_errors`."""
        return read_errors(url, self.kind)

    def __init__(self, url: str) -> None:
        self.url = url
        self._listed: dict[str, Listing | None] = {}
        self._outside: dict[str, FileInfo | None] = {}
        self._children: dict[str, list[str]] = {}
        """The names in folders outside all typed URLs, as the folder of a typed file is."""
        self._lock = RLock()

    def begin(self, typed: Address) -> None:
        """Make the next question about anything below a typed URL list it, whatever was known."""
        with self._lock:
            self._listed[typed.url] = None
            self._forget()

    def refresh(self) -> None:
        """Forget what was listed, so that later answers reflect the state at that time."""
        with self._lock:
            self._listed = dict.fromkeys(self._listed)
            self._forget()

    def _forget(self) -> None:
        self._outside.clear()
        self._children.clear()

    def entry(self, url: str) -> FileInfo | None:
        """The file or folder at `url`, or None. Raises ReshardError if the store does not answer."""
        with self._lock:
            if listing := self._listing(url):
                return listing.entries.get(url)
            above = (root for root in self._listed if root.startswith(url + "/"))
            if any((listed := self._listed[root]) and listed.entries for root in above):
                return ANY_FOLDER
            if url not in self._outside:
                self._outside[url] = self.look_up(url)
            return self._outside[url]

    def children(self, url: str) -> list[str]:
        """The names in the folder `url`, sorted."""
        with self._lock:
            if listing := self._listing(url):
                return listing.children.get(url, [])
            if url not in self._children:
                files = self.list_files(url, deep=False)
                self._children[url] = sorted({each[len(url) + 1 :].split("/")[0] for each in files})
            return self._children[url]

    def _listing(self, url: str) -> Listing | None:
        """The listing that covers `url`, made now if necessary; None if no typed URL does."""
        for root in self._listed:
            if url == root or url.startswith(root + "/"):
                listing = self._listed[root]
                if listing is None:
                    listing = self._listed[root] = Listing(root, self.list_files(root, deep=True))
                return listing
        return None

    @abstractmethod
    def list_files(self, root: str, *, deep: bool) -> dict[str, FileInfo]:
        """All files at or below `root`, by URL; without `deep`, the files and folders directly in it."""

    @abstractmethod
    def look_up(self, url: str) -> FileInfo | None:
        """The entry at a single URL; None if there is nothing."""


class Listing:
    """Files below one URL, and the folders implied by their names; `children` are sorted."""

    def __init__(self, root: str, files: dict[str, FileInfo]) -> None:
        self.entries = dict(files)
        children: dict[str, set[str]] = {}
        for file in files:
            url = file
            while url != root:
                folder, _, name = url.rpartition("/")
                children.setdefault(folder, set()).add(name)
                self.entries.setdefault(folder, ANY_FOLDER)
                url = folder
        self.children = {folder: sorted(names) for folder, names in children.items()}
