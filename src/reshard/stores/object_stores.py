"""Object stores, each a class that declares its package, and what they share with S3."""

from __future__ import annotations

import re
from datetime import datetime
from functools import cached_property
from typing import Any, ClassVar

from reshard.base import schemes
from reshard.base.later_imports import imported_later
from reshard.stores.address import Address, StoreKind, normalized_url, url_with_password
from reshard.stores.file_info import ANY_FOLDER, FileInfo
from reshard.stores.range_responses import RangeRequest
from reshard.stores.remote_file import RemoteStore
from reshard.stores.store_errors import retry

with imported_later(__name__):
    from email.utils import parsedate_to_datetime


PASSWORD_PATTERN = r"(?!arn:)[^/@:]*:.*@"

IDENTITY_KEYS = ("ETag", "etag", "generation", "md5Hash", "content_md5", "VersionId")
"""Keys of the packages for values that change with the bytes of a file, the most reliable first."""
TIME_KEYS = ("LastModified", "last_modified", "updated", "mtime")
"""Keys of the packages for the time of the last change. Without one of either kind, only the size shows a change."""


class ObjectStore(RemoteStore):
    """A bucket, read through its package for fsspec. Its packages take no user from a URL."""

    user: ClassVar[re.Pattern[str]] = re.compile(
        rf"{PASSWORD_PATTERN}|[^/]*@|(?!arn:)[^/:]*:(?!\d{{1,5}}(?:/|$))"
    )
    """A user, perhaps with a password, before the name of the bucket; the @ between them may be missing."""

    @classmethod
    def address(cls, url: str) -> Address:
        """Only web servers have queries: in names of objects, `?` and `#` are characters like any other."""
        scheme, _, rest = url.partition("://")
        if cls.user.match(rest):
            raise url_with_password(scheme, cls.kind)
        return Address(scheme, normalized_url(scheme, rest, cls.kind))

    @cached_property
    def fs(self) -> Any:
        """The file system of fsspec."""
        with self.read_errors(self.url):
            from fsspec import register_implementation
            from fsspec.core import url_to_fs

            if self.kind.file_system:
                scheme = self.url.partition("://")[0]
                register_implementation(scheme, self.kind.file_system, clobber=True)
            return url_to_fs(self.url, use_listings_cache=False)[0]

    def key(self, url: str) -> str:
        """The name by which the package knows the object at a URL."""
        return str(self.fs._strip_protocol(url))

    def list_files(self, root: str, *, deep: bool) -> dict[str, FileInfo]:
        base = len(self.key(self.url))
        with self.read_errors(root):
            try:
                objects = retry(
                    lambda: (
                        self.fs.find(self.key(root), detail=True)
                        if deep
                        else {each["name"]: each for each in self.fs.ls(self.key(root), detail=True)}
                    )
                )
            except (FileNotFoundError, NotADirectoryError):
                return {}
        return {self.url + name[base:].rstrip("/"): entry_of(info) for name, info in objects.items()}

    def look_up(self, url: str) -> FileInfo | None:
        with self.read_errors(url):
            try:
                return entry_of(retry(lambda: self.fs.info(self.key(url))))
            except FileNotFoundError:
                return None

    def fetch(self, wanted: RangeRequest) -> bytes:
        # These packages do not pass the headers on: a new version is noticed when the store is listed again.
        content: bytes = self.fs.cat_file(self.key(wanted.url), start=wanted.begin, end=wanted.end)
        return content


class GoogleCloud(ObjectStore):
    """A bucket of Google Cloud Storage."""

    kind = StoreKind(
        schemes.GOOGLE_CLOUD,
        "gcsfs",
        "run `gcloud auth application-default login`; for a public bucket set FSSPEC_GS_TOKEN=anon",
    )


class AlibabaOss(ObjectStore):
    """A bucket of Alibaba Cloud OSS."""

    kind = StoreKind(
        schemes.ALIBABA_OSS, "ossfs", "set OSS_ACCESS_KEY_ID, OSS_ACCESS_KEY_SECRET and OSS_ENDPOINT"
    )


class AzureBlobs(ObjectStore):
    """A container of Azure Blob Storage. The container may be written as a user: abfs://CONTAINER@ACCOUNT."""

    kind = StoreKind(
        schemes.AZURE,
        "adlfs",
        "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or sign in with `az login`",
    )
    user = re.compile(PASSWORD_PATTERN)


OBJECT_STORES = (GoogleCloud, AlibabaOss, AzureBlobs)
"""Those that need nothing but their package. `S3` also checks the headers of answers."""


def entry_of(info: dict[str, Any]) -> FileInfo:
    """The entry of a file, from what the store's package reports."""
    if info.get("type") == "directory":
        return ANY_FOLDER
    identity = next((str(info[key]).strip('"') for key in IDENTITY_KEYS if info.get(key)), "")
    time = next((info[key] for key in TIME_KEYS if info.get(key)), None)
    if isinstance(time, str):
        time = _parsed_time(time)
    modified = int(time.timestamp() * 10**9) if isinstance(time, datetime) else int((time or 0) * 10**9)
    return FileInfo(int(info.get("size") or 0), modified, identity)


def _parsed_time(time: str) -> datetime:
    """A time as ISO 8601 or as in HTTP headers."""
    try:
        return datetime.fromisoformat(time.replace("Z", "+00:00"))
    except ValueError:
        return parsedate_to_datetime(time)
