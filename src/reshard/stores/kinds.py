"""The kinds of stores: how each is listed and read, through its package."""

from __future__ import annotations

from datetime import datetime
from functools import cached_property
from typing import Any

from reshard.stores.address import Address
from reshard.stores.errors import retried, translated
from reshard.stores.store import FOLDER, Entry, Store

IDENTITIES = ("ETag", "etag", "generation", "md5Hash", "content_md5", "VersionId")
"""Keys of the packages for values that change with the bytes of a file, the most reliable first."""
TIMES = ("LastModified", "last_modified", "updated", "mtime")


def make(place: Address) -> Store:
    """The store that contains an address."""
    from reshard.stores.hub import HubStore
    from reshard.stores.web import WebStore

    parts = place.shown.split("/")
    if place.kind == "hf":
        return HubStore("/".join(parts[:4]))
    host = "/".join(parts[:3])
    return WebStore(host) if place.kind == "http" else ObjectStore(host)


class ObjectStore(Store):
    """A bucket of S3, Google Cloud Storage, Alibaba Cloud OSS or Azure Blob Storage."""

    @cached_property
    def fs(self) -> Any:
        """The file system of fsspec."""
        with translated(self.url):
            from fsspec.core import url_to_fs

            return url_to_fs(self.url, use_listings_cache=False)[0]

    def _key(self, url: str) -> str:
        return str(self.fs._strip_protocol(url))

    def _find(self, root: str, *, deep: bool) -> dict[str, Entry]:
        base = len(self._key(self.url))
        with translated(root):
            try:
                found = retried(
                    lambda: (
                        self.fs.find(self._key(root), detail=True)
                        if deep
                        else {each["name"]: each for each in self.fs.ls(self._key(root), detail=True)}
                    )
                )
            except (FileNotFoundError, NotADirectoryError):
                return {}
        return {self.url + name[base:].rstrip("/"): entry_of(info) for name, info in found.items()}

    def _look(self, url: str) -> Entry | None:
        with translated(url):
            try:
                return entry_of(retried(lambda: self.fs.info(self._key(url))))
            except FileNotFoundError:
                return None

    def fetch(self, url: str, begin: int, end: int) -> bytes:
        content: bytes = self.fs.cat_file(self._key(url), start=begin, end=end)
        return content


def entry_of(info: dict[str, Any]) -> Entry:
    """The entry of a file, from what the store's package reports."""
    if info.get("type") == "directory":
        return FOLDER
    identity = next((str(info[key]).strip('"') for key in IDENTITIES if info.get(key)), "")
    time = next((info[key] for key in TIMES if info.get(key)), None)
    if isinstance(time, str):
        time = datetime.fromisoformat(time.replace("Z", "+00:00"))
    modified = int(time.timestamp() * 10**9) if isinstance(time, datetime) else int((time or 0) * 10**9)
    return Entry(int(info.get("size") or 0), modified, identity)
