"""Files open for positioned reads, and those of a local disk."""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

from reshard.base.errors import ReshardError
from reshard.stores.file_info import Stamp

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class OpenFile(ABC):
    """A file open for reading at any offset, from several threads."""

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.stamp().size

    @abstractmethod
    def stamp(self) -> Stamp:
        """The state of the file."""

    @abstractmethod
    def read(self, at: int, count: int) -> bytes:
        """Bytes `at` to `at + count`, or fewer if the file ends before. Raises OSError."""

    @abstractmethod
    def fill(self, parts: Iterable[tuple[int, memoryview]]) -> int | None:
        """Fill each buffer from its offset in the file. If the file ends too early, return the end that was expected.

        Raises OSError.
        """

    def close(self) -> None:  # noqa: B027  # files of stores have nothing to close
        """Close the file."""

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _link_to_nothing(link: Path) -> ReshardError:
    return ReshardError(
        "link-to-nothing",
        "a file is a broken symbolic link",
        file=str(link),
        found=f"a link to {link.readlink()}",
        remedy="copy what the links lead to as well (cp -rL, rsync -L); the Hub's cache keeps files in blobs/",
    )


class LocalFile(OpenFile):
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

    def stamp(self) -> Stamp:
        """The stamp of the open file: opening it makes a file server check its state."""
        try:
            status = os.fstat(self._descriptor)
        except OSError as error:
            raise self._with_path(error) from None
        return Stamp(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)

    def read(self, at: int, count: int) -> bytes:
        try:
            content = os.pread(self._descriptor, count, at)
            while len(content) < count and (
                more := os.pread(self._descriptor, count - len(content), at + len(content))
            ):
                content += more
        except OSError as error:
            raise self._with_path(error) from None
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
            raise self._with_path(error) from None
        return None

    def _with_path(self, error: OSError) -> OSError:
        """The same error with the file's name: the system omits it for a descriptor."""
        return OSError(error.errno, error.strerror, self._path)

    def close(self) -> None:
        try:
            os.close(self._descriptor)
        except OSError as error:  # file servers report some failures only now
            raise self._with_path(error) from None


def _read_into(descriptor: int, out: memoryview, offset: int) -> int:
    """Fill `out` from byte `offset` of a file. Returns the bytes read by this one call."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, (out,), offset)
    content = os.pread(descriptor, len(out), offset)  # macOS before 11 has no preadv
    out[: len(content)] = content
    return len(content)
