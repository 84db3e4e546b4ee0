"""Paths in stores, which behave like `pathlib.Path`.

A `StorePath` is a `Path` whose text is a URL, so readers need not know the difference.
Whatever a path asks the system, it asks the store instead. A path consists only of its text, which also determines the
store: so paths can be joined, compared, pickled and stored as strings like any other.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Generator, Iterator
from errno import EINVAL, EISDIR, ENOENT, ENOTDIR
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path, PosixPath
from typing import IO, Any

from reshard.stores import hub, registry
from reshard.stores.file_info import FileInfo
from reshard.stores.open_file import LocalFile, OpenFile
from reshard.stores.tar_store import ArchiveStore


class StorePath(PosixPath):
    """The URL of something in a store, without credentials, as a path that can be read."""

    def __str__(self) -> str:
        scheme, *rest = self.parts or ("",)
        return f"{scheme}//{'/'.join(rest)}" if scheme.endswith(":") else "/".join([scheme, *rest])

    def opened(self) -> OpenFile:
        """The file, open for reading. Raises OSError if it does not exist."""
        url, entry = str(self), self._status()
        return registry.store_at(url).opened(url, entry)

    def _entry(self) -> FileInfo | None:
        url = str(self)
        return registry.store_at(url).entry(url)

    def _status(self) -> FileInfo:
        entry = self._entry()
        if entry is None or entry.is_folder:
            code = ENOENT if entry is None else EISDIR
            raise OSError(code, os.strerror(code), str(self))
        return entry

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return self._entry() is not None

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        entry = self._entry()
        return entry is not None and not entry.is_folder

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        entry = self._entry()
        return entry is not None and entry.is_folder

    def is_symlink(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        entry = self._entry()
        if entry is None:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(self))
        mode = (stat.S_IFDIR | 0o555) if entry.is_folder else (stat.S_IFREG | 0o444)
        seconds = entry.modified // 10**9
        return os.stat_result((mode, 0, 0, 1, 0, 0, entry.size, seconds, seconds, seconds))

    def lstat(self) -> os.stat_result:
        return self.stat()

    def iterdir(self) -> Generator[StorePath, None, None]:
        if not self.is_dir():
            raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), str(self))
        return (self / name for name in registry.store_at(str(self)).children(str(self)))

    def glob(self, pattern: str | PathLike[str], **how: Any) -> Iterator[StorePath]:  # type: ignore[override]
        return self._matching(Path(pattern).parts)

    def rglob(self, pattern: str | PathLike[str], **how: Any) -> Iterator[StorePath]:  # type: ignore[override]
        return self._matching(("**", *Path(pattern).parts))

    def _matching(self, parts: tuple[str, ...]) -> Iterator[StorePath]:
        if not parts:
            yield self
            return
        first, rest = parts[0], parts[1:]
        if first == "**":
            yield from self._matching(rest)
        names = registry.store_at(str(self)).children(str(self)) if self.is_dir() else []
        for name in names:  # a path is made only of a name that matches: folders have many
            if first == "**":
                if (child := self / name).is_dir():
                    yield from child._matching(parts)
            elif fnmatchcase(name, first):
                yield from (self / name)._matching(rest)

    def open(  # type: ignore[override]
        self,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> IO[Any]:
        if set(mode) - set("rtb"):
            raise OSError(EINVAL, "a store is opened for reading only", str(self))
        raw = io.BufferedReader(_RawFile(self.opened()), 1 << 16)
        return raw if "b" in mode else io.TextIOWrapper(raw, encoding or "utf-8", errors, newline)

    def read_bytes(self) -> bytes:
        with self.opened() as file:
            return file.read(0, file.size)

    def resolve(self, strict: bool = False) -> StorePath:
        return self

    def absolute(self) -> StorePath:
        return self

    def is_absolute(self) -> bool:
        return True

    def expanduser(self) -> StorePath:
        return self

    @property
    def parent(self) -> StorePath:
        """The parent folder; a bucket, server or repository is its own parent."""
        return self if len(self.parts) <= self._top() else type(self)(*self.parts[:-1])

    @property
    def parents(self) -> tuple[StorePath, ...]:
        return tuple(type(self)(*self.parts[:end]) for end in range(len(self.parts) - 1, self._top() - 1, -1))

    def _top(self) -> int:
        is_whole = self.parts[0].endswith(":")
        return 1 + registry.store_class(str(self)).top(str(self)) if is_whole else 1


class _RawFile(io.RawIOBase):
    """A file of a store as Python's `io` reads it."""

    def __init__(self, file: OpenFile) -> None:
        super().__init__()
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        return self._at

    def readinto(self, out: Any) -> int:
        content = self._file.read(self._at, len(out))
        out[: len(content)] = content
        self._at += len(content)
        return len(content)


def is_remote(path: str | PathLike[str]) -> bool:
    """Whether a path, or its text, is the URL of something in a store."""
    return isinstance(path, StorePath) or registry.is_url(os.fspath(path))


def typed_path(typed: str | PathLike[str]) -> Path:
    """The path that a user typed. For a URL, the next question about anything below it lists the store again.

    A leading `~` is expanded: shells do not do that in quotes, nor after the `=` of an option.
    """
    if isinstance(typed, Path):
        return typed
    text = os.fspath(typed)
    return StorePath(registry.connect(text)) if registry.is_url(text) else expanded_path(text)


def expanded_path(text: str) -> Path:
    """A local path with a leading `~` expanded. One that names no user is a name like any other.

    Raises ReshardError for a URL.
    """
    registry.check_local(text)
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def source_path(typed: str | PathLike[str]) -> Path:
    """The same for a source, which may also be a model id on the Hub if no such local path exists."""
    if isinstance(typed, str) and not registry.is_url(typed) and not typed_path(typed).exists():
        typed = f"hf://{typed}" if hub.may_have(typed) else typed
    return typed_path(typed)


def homes_of(path: Path) -> list[Path]:
    """`path`, and the paths that what is inside it has in stores, as the members of an archive have."""
    return [path, *(StorePath(url) for url in registry.urls_inside(path))]


def archive_folder(archive: Path) -> Path:
    """The contents of a tar archive on a disk, as a folder. The next question about it lists the archive again."""
    return StorePath(registry.connect(ArchiveStore.inside(archive)))


def as_path(kept: str | PathLike[str]) -> Path:
    """The path, local or in a store, of a stored string."""
    if isinstance(kept, Path):
        return kept
    return StorePath(kept) if is_remote(kept) else Path(kept)


def open_file(path: str | Path) -> OpenFile:
    """Open a file on a disk or in a store. Raises OSError, and ReshardError for anything but a regular file."""
    place = as_path(path)
    return place.opened() if isinstance(place, StorePath) else LocalFile(place)


def realpath(path: Path) -> Path:
    """`path` with links followed, as far as it exists. Stores have no links."""
    if isinstance(path, StorePath):
        return path
    return Path(os.path.realpath(path))  # for circular links, resolve() raises RuntimeError
