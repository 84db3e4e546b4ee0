"""Files in a tar archive on a disk, read where they are: an uncompressed archive has their bytes one after another.

`tar://tmp/model.nemo/model_weights/common.pt` is the member `model_weights/common.pt` of `/tmp/model.nemo`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from reshard.stores import tar_members
from reshard.stores.address import Address, StoreKind, shown_address
from reshard.stores.file_info import ANY_FOLDER, FileInfo, Stamp
from reshard.stores.open_file import LocalFile, OpenFile
from reshard.stores.range_responses import RangeRequest
from reshard.stores.store import Store

SCHEME = "tar"


class ArchiveStore(Store):
    """One archive, listed when it is first asked for."""

    kind = StoreKind((SCHEME,), "", "", "FOLDER/FILE.nemo")

    @classmethod
    def address(cls, url: str) -> Address:
        scheme, _, rest = url.partition("://")
        return Address(scheme, shown_address(scheme, rest, cls.kind))

    @classmethod
    def holding(cls, place: Address) -> ArchiveStore:
        return cls(_whole(place.shown))

    @classmethod
    def top(cls, url: str) -> int:
        return _whole(url).count("/") - 1

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._archive = _local(url)
        self._offsets: dict[str, int] = {}

    def entry(self, url: str) -> FileInfo | None:
        """The same; an archive without files is an empty folder."""
        return super().entry(url) or (ANY_FOLDER if url == self.url else None)

    def _find(self, root: str, *, deep: bool) -> dict[str, FileInfo]:
        with LocalFile(self._archive) as file:
            modified = file.stamp().modified
            found: dict[str, tar_members.TarMember] = {}
            for each in tar_members.members(file, str(self._archive)):
                found[each.name] = found.get(each.link, each) if each.link else each
        self._offsets = {f"{self.url}/{name}": each.offset for name, each in found.items()}
        entries = {f"{self.url}/{name}": FileInfo(each.size, modified) for name, each in found.items()}
        return {url: entry for url, entry in entries.items() if url == root or url.startswith(f"{root}/")}

    def _look(self, url: str) -> FileInfo | None:
        found = self._find(url, deep=True)
        return found.get(url) or (ANY_FOLDER if found else None)

    def opened(self, url: str, entry: FileInfo) -> OpenFile:
        return _OpenMember(self._archive, self._offsets[url], entry)

    def fetch(self, wanted: RangeRequest) -> bytes:
        with LocalFile(self._archive) as file:
            begin = self._offsets[wanted.url]
            return file.read(begin + wanted.begin, wanted.end - wanted.begin)


def inside(archive: Path) -> str:
    """The URL of what is in an archive."""
    return f"{SCHEME}:/{archive.absolute().as_posix()}"


def _local(url: str) -> Path:
    return Path("/", *url.split("/")[2:])


def _whole(url: str) -> str:
    """The URL of the archive that a URL is in: its shortest beginning that is a file. Raises OSError if none is."""
    parts = url.split("/")
    wholes = ("/".join(parts[:end]) for end in range(3, len(parts) + 1))
    found = next((whole for whole in wholes if _local(whole).is_file()), None)
    if found is None:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), url)
    return found


class _OpenMember:
    """A member, open for reading."""

    def __init__(self, archive: Path, begin: int, entry: FileInfo) -> None:
        self._file, self._begin, self._entry = LocalFile(archive), begin, entry

    @property
    def size(self) -> int:
        return self._entry.size

    def stamp(self) -> Stamp:
        return Stamp(self._entry.size, self._entry.modified, self._entry.identity)

    def read(self, at: int, count: int) -> bytes:
        return self._file.read(self._begin + at, max(min(count, self.size - at), 0))

    def fill(self, parts: Iterable[tuple[int, memoryview]]) -> int | None:
        parts = list(parts)
        if (end := max((offset + len(out) for offset, out in parts), default=0)) > self.size:
            return end
        reached = self._file.fill((self._begin + offset, out) for offset, out in parts)
        return None if reached is None else reached - self._begin

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> _OpenMember:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
