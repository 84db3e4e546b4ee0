"""Objects below the URL of a writable store: list, put, read and remove them, with one call each."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from inspect import signature
from pathlib import Path
from typing import Any

from reshard.base.errors import ReshardError, type_and_message
from reshard.stores import registry
from reshard.stores.address import StoreKind
from reshard.stores.file_info import FileInfo
from reshard.stores.object_stores import ObjectStore, entry_of
from reshard.stores.path import StorePath
from reshard.stores.store_errors import is_denied, missing_package, retry

SMALLEST, LARGEST, PARTS = 5 << 20, 64 << 20, 9_000
"""Part sizes in bytes, and parts per file: S3 allows 10,000 of at least 5 MiB (the last one may be smaller)."""

OBJECTS_PER_REMOVAL = 1000
"""Objects removed in one request."""


class UploadStoppedError(Exception):
    """The run ended before an upload did."""


class Bucket:
    """All objects whose URL begins with `url` and a slash, by the rest of their names.

    Nothing is cached: each call asks the store. Raises ReshardError for what it refuses, with an OSError as the
    cause if the same call may succeed later.
    """

    def __init__(self, path: StorePath) -> None:
        self.url = str(path).rstrip("/")
        store = registry.store_at(self.url)
        if not isinstance(store, ObjectStore):
            raise not_writable(self.url)
        self._store = store

    def listing(self) -> dict[str, FileInfo]:
        """All objects, by name."""
        with self._request(self.url, "list"):
            files = self._store.list_files(self.url, deep=True)
        below = len(self.url) + 1
        return {url[below:]: entry for url, entry in files.items() if url.startswith(self.url + "/")}

    def look(self, name: str) -> FileInfo | None:
        """One object, or None."""
        with self._request(self.url, "read"), suppress(FileNotFoundError):
            return entry_of(retry(lambda: self._fs.info(self._key(name))))
        return None

    def read(self, name: str) -> bytes | None:
        """The content of a small object; None if it does not exist."""
        with self._request(self.url, "read"), suppress(FileNotFoundError):
            return bytes(retry(lambda: self._fs.cat_file(self._key(name))))
        return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, and replace an existing one."""
        with self._request(self.url, "write"):
            retry(lambda: self._fs.pipe_file(self._key(name), content))

    def create(self, name: str, content: bytes) -> bool:
        """Create a small object; False if it exists. Without an atomic create, one created meanwhile is overwritten."""
        able = signature(getattr(self._fs, "_pipe_file", self._fs.pipe_file)).parameters
        if "mode" not in able and self.look(name):
            return False
        how = {"mode": "create"} if "mode" in able else {}
        with self._request(self.url, "write"), suppress(FileExistsError):
            self._fs.pipe_file(self._key(name), content, **how)
            return True
        return False

    def put(
        self,
        name: str,
        file: Path,
        memory: int,
        on_bytes: Callable[[int], None],
        is_stopped: Callable[[], bool],
    ) -> None:
        """Upload a file, a large one in sequential parts, using `memory` bytes. Raises UploadStoppedError."""
        able = signature(getattr(self._fs, "_put_file", self._fs.put_file)).parameters
        wanted = {"max_concurrency": 1, "chunksize": part_size(file.stat().st_size, memory)}
        how = {key: value for key, value in wanted.items() if key in able}
        passed = _upload_callback(on_bytes, is_stopped)

        def once() -> None:
            passed.rewind()
            self._fs.put_file(str(file), self._key(name), callback=passed, **how)

        with self._request(f"{self.url}/{name}", "write"):
            retry(once)

    def remove(self, names: Iterable[str]) -> None:
        """Remove existing objects."""
        keys = [self._key(name) for name in names]
        for begin in range(0, len(keys), OBJECTS_PER_REMOVAL):
            with self._request(self.url, "remove"):
                self._fs.rm(keys[begin : begin + OBJECTS_PER_REMOVAL])

    def forget(self) -> None:
        """Make paths below the URL list the store again."""
        self._store.refresh()

    def forget_parts(self, names: Collection[str]) -> None:
        """Remove the parts of unfinished uploads of these objects, which S3 keeps and bills."""
        call = getattr(self._fs, "call_s3", None)
        if call is None:
            return
        bucket, prefix, _ = self._fs.split_path(self._key(""))
        with suppress(ReshardError), self._request(self.url, "list"):  # not every user may do this
            for each in call("list_multipart_uploads", Bucket=bucket, Prefix=prefix).get("Uploads") or ():
                if each["Key"].removeprefix(f"{prefix.rstrip('/')}/") in names:
                    call("abort_multipart_upload", Bucket=bucket, Key=each["Key"], UploadId=each["UploadId"])

    def _request(self, url: str, what: str) -> AbstractContextManager[None]:
        return store_requests(url, what, self._store.kind)

    @property
    def _fs(self) -> Any:
        return self._store.fs

    def _key(self, name: str) -> str:
        return self._store.key(f"{self.url}/{name}")


def part_size(nbytes: int, memory: int) -> int:
    """Bytes per part of a file of `nbytes`, with two parts in memory, as S3 and Google Cloud Storage allow."""
    fitting = min(LARGEST, memory // 2) >> 20 << 20
    needed = -(-nbytes // PARTS >> 20) << 20
    return max(SMALLEST, fitting, needed)


def _upload_callback(on_bytes: Callable[[int], None], is_stopped: Callable[[], bool]) -> Any:
    """A callback for fsspec that counts the bytes sent, and ends the upload when the run is stopped."""
    from fsspec.callbacks import Callback

    class Passed(Callback):  # type: ignore[misc]
        sent = 0

        def relative_update(self, inc: int = 1) -> None:
            if is_stopped():
                raise UploadStoppedError
            self.sent += inc
            on_bytes(inc)

        def rewind(self) -> None:
            """Subtract what was sent: it is lost."""
            if self.sent:
                on_bytes(-self.sent)
            self.sent = 0

    return Passed()


@contextmanager
def store_requests(url: str, what: str, kind: StoreKind) -> Iterator[None]:
    """Raise ReshardError for anything that a store, its package or the network refuses."""
    try:
        yield
    except (FileExistsError, MemoryError, UploadStoppedError):
        raise
    except FileNotFoundError as error:
        if what == "read":
            raise
        if what != "write":
            raise _wrong_answer(url, type_and_message(error)) from _temporary_cause()
        raise ReshardError(
            "bucket-not-found",
            "this bucket does not exist",
            file=url,
            found=str(error),
            remedy="create the bucket, or correct its name",
        ) from None
    except ImportError as error:
        raise missing_package(url, kind, error) from error
    except ReshardError as error:
        raise error from error.__cause__ if isinstance(error.__cause__, OSError) else _temporary_cause()
    except Exception as error:
        answer = type_and_message(error)
        if is_denied(error):
            raise ReshardError(
                "store-access-denied",
                f"the store does not let this user {what} here",
                file=url,
                found=answer,
                remedy=kind.sign_in,
            ) from None
        raise _wrong_answer(url, answer) from _temporary_cause()


def _wrong_answer(url: str, found: str) -> ReshardError:
    return ReshardError(
        "bucket-answer-wrong",
        "the request to the store failed",
        file=url,
        found=found,
        remedy="check the address and the network, then run the same command again",
    )


def _temporary_cause() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


def not_writable(url: str) -> ReshardError:
    """The error for a URL that cannot be written to."""
    is_hub = url.startswith("hf://")
    return ReshardError(
        "store-not-writable",
        "nothing can be written to this kind of address",
        file=url,
        expected="a folder on a disk, or one of " + ", ".join(f"{each}://" for each in registry.WRITABLE),
        remedy="name a folder as the destination, and upload it with --push-to-hub Org/Name"
        if is_hub
        else "name a folder or a bucket, and copy it from there",
    )
