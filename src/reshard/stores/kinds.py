"""The kinds of stores: how each is listed and read, through its package."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import datetime
from functools import cached_property
from typing import Any

from reshard.stores.address import Address
from reshard.stores.errors import retried, translated
from reshard.stores.ranges import Body, Wanted
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

    def fetch(self, wanted: Wanted) -> bytes:
        content: bytes
        if hasattr(self.fs, "_call_s3"):
            content = self._sync(self._from_s3, wanted)
        else:  # these packages do not pass the headers on: a new version is noticed when the store is listed again
            content = self.fs.cat_file(self._key(wanted.url), start=wanted.begin, end=wanted.end)
        return content

    async def _from_s3(self, wanted: Wanted) -> bytes:
        """The same from s3fs, whose `cat_file` does not compare the range and the ETag of an answer."""
        bucket, key, version = self.fs.split_path(self._key(wanted.url))
        of_version = {"VersionId": version} if version else {}
        span = f"bytes={wanted.begin}-{wanted.end - 1}"
        answer = await self.fs._call_s3("get_object", Bucket=bucket, Key=key, Range=span, **of_version)
        body = answer["Body"]
        try:
            size = wanted.size_in(answer.get("ContentRange"))
            wanted.check_state(Entry(size, 0, answer.get("ETag", "").strip('"')))
            content = Body(wanted, size)
            while part := await body.read(1 << 20):
                content.add(part)
            return content.content()
        finally:
            body.close()

    def _sync(self, function: Callable[[Wanted], Coroutine[Any, Any, bytes]], wanted: Wanted) -> bytes:
        from fsspec.asyn import sync

        content: bytes = sync(self.fs.loop, function, wanted)
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
