"""Files open for positioned reads, local or remote, and stamps that distinguish their states."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

from reshard.errors import ReshardError
from reshard.stores.path import StorePath, as_path

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class Stamp(NamedTuple):
    """What distinguishes states of a file, as far as the system records it.

    `modified` is in nanoseconds, 0 if unknown. `identity` is the inode of a local file; in a store it is the
    version, ETag or commit. `changed` is the time of the last change of a local file's content or attributes, in
    nanoseconds: unlike `modified`, no program can set it, but a new name or owner changes it, too.
    """

    size: int
    modified: int
    identity: int | str
    changed: int = 0

    def as_dict(self) -> dict[str, int | str]:
        """The entry of a file in a record of what was read."""
        modified = datetime.fromtimestamp(self.modified / 1e9, timezone.utc).isoformat()
        known: dict[str, int | str] = {"modified": modified} if self.modified else {}
        version = {"version": self.identity} if isinstance(self.identity, str) and self.identity else {}
        return {"bytes": self.size, **known, **version}

    def __str__(self) -> str:
        modified = datetime.fromtimestamp(self.modified / 1e9).isoformat(" ", "milliseconds")
        known = f", modified {modified}" if self.modified else ""
        name = "inode" if isinstance(self.identity, int) else "version"
        return f"{self.size:,} bytes{known}" + (f", {name} {self.identity}" if self.identity else "")


class File(Protocol):
    """A file open for reading at any offset, from several threads."""

    @property
    def size(self) -> int:
        """Bytes of the file."""

    def stamp(self) -> Stamp:
        """The state of the file."""

    def read(self, at: int, count: int) -> bytes:
        """Bytes `at` to `at + count`, or fewer if the file ends before. Raises OSError."""

    def fill(self, parts: Iterable[tuple[int, memoryview]]) -> int | None:
        """Fill each buffer from its offset in the file. If the file ends too early, return the end that was expected.

        Raises OSError.
        """

    def close(self) -> None:
        """Close the file."""

    def __enter__(self) -> File: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def _link_to_nothing(link: Path) -> ReshardError:
    return ReshardError(
        "link-to-nothing",
        "a file is a broken symbolic link",
        file=str(link),
        found=f"a link to {link.readlink()}",
        remedy="copy what the links lead to as well (cp -rL, rsync -L); the Hub's cache keeps files in blobs/",
    )


class LocalFile:
    """A file of a local file system.

    It is read, not mapped: a mapped page that cannot be read kills the process.
    """

    def __init__(self, path: str | Path) -> None:
        """Open a regular file. Anything else is not opened, so it cannot block: raises ReshardError."""
        try:
            kind = stat.S_IFMT(Path(path).stat().st_mode)
        except FileNotFoundError:
            if Path(path).is_symlink():
                raise _link_to_nothing(Path(path)) from None
            raise
        if kind != stat.S_IFREG:
            raise ReshardError(
                "not-a-regular-file",
                "not a regular file",
                file=str(path),
                expected="a regular file, or a link to one",
                found=_KINDS.get(kind, "something else"),
                remedy="copy the checkpoint again, and check what put this in its place",
            )
        self._path = str(path)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    @property
    def size(self) -> int:
        return self.stamp().size

    def stamp(self) -> Stamp:
        """The stamp of the open file: opening it makes a file server check its state."""
        try:
            status = os.fstat(self._descriptor)
        except OSError as error:
            raise self._named(error) from None
        return Stamp(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)

    def read(self, at: int, count: int) -> bytes:
        try:
            content = os.pread(self._descriptor, count, at)
            while len(content) < count and (
                more := os.pread(self._descriptor, count - len(content), at + len(content))
            ):
                content += more
        except OSError as error:
            raise self._named(error) from None
        return content

    def fill(self, parts: Iterable[tuple[int, memoryview]]) -> int | None:
        descriptor = self._descriptor
        try:
            for offset, out in parts:
                count = _read_into(descriptor, out, offset)
                while count < len(out):
                    more = _read_into(descriptor, out[count:], offset + count)
                    if not more:
                        return offset + len(out)
                    count += more
        except OSError as error:
            raise self._named(error) from None
        return None

    def _named(self, error: OSError) -> OSError:
        """The same error with the file's name: the system omits it for a descriptor."""
        return OSError(error.errno, error.strerror, self._path)

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_file(path: str | Path) -> File:
    """Open a file on a disk or in a store. Raises OSError, and ReshardError for anything but a regular file."""
    place = as_path(path)
    return place.opened() if isinstance(place, StorePath) else LocalFile(place)


def _read_into(descriptor: int, out: memoryview, offset: int) -> int:
    """Fill `out` from byte `offset` of a file. Returns the bytes read by this one call."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, (out,), offset)
    content = os.pread(descriptor, len(out), offset)  # macOS before 11 has no preadv
    out[: len(content)] = content
    return len(content)
