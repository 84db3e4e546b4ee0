"""Files in a tar archive on a disk, read where they are: an uncompressed archive has their bytes one after another.

`tar://tmp/model.nemo/model_weights/common.pt` is the member `model_weights/common.pt` of `/tmp/model.nemo`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from reshard.stores import tar_members
from reshard.stores.address import Address, StoreKind
from reshard.stores.file_info import ANY_FOLDER, FileInfo, Stamp
from reshard.stores.local_store import LocalStore, local_path
from reshard.stores.open_file import LocalFile, OpenFile


class ArchiveStore(LocalStore):
    """One archive, listed when it is first asked for."""

    kind = StoreKind(("tar",), "", "", "FOLDER/FILE.nemo")

    @classmethod
    def containing(cls, place: Address) -> ArchiveStore:
        return cls(_archive_url(place.url))

    @classmethod
    def top(cls, url: str) -> int:
        return _archive_url(url).count("/") - 1

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._archive = local_path(url)
        self._offsets: dict[str, int] = {}

    def entry(self, url: str) -> FileInfo | None:
        """The same; an archive without files is an empty folder."""
        return super().entry(url) or (ANY_FOLDER if url == self.url else None)

    def list_files(self, root: str, *, deep: bool) -> dict[str, FileInfo]:
        with LocalFile(self._archive) as file:
            modified = file.stamp().modified
            members: dict[str, tar_members.TarMember] = {}
            for each in tar_members.read_members(file, str(self._archive)):
                members[each.name] = members.get(each.link, each) if each.link else each
        self._offsets = {f"{self.url}/{name}": each.offset for name, each in members.items()}
        entries = {f"{self.url}/{name}": FileInfo(each.size, modified) for name, each in members.items()}
        return {url: entry for url, entry in entries.items() if url == root or url.startswith(f"{root}/")}

    def look_up(self, url: str) -> FileInfo | None:
        below = self.list_files(url, deep=True)
        return below.get(url) or (ANY_FOLDER if below else None)

    def opened(self, url: str, entry: FileInfo) -> OpenFile:
        return _OpenMember(self._archive, self._offsets[url], entry)


def _archive_url(url: str) -> str:
    """The URL of the archive that a URL is in: its shortest beginning that is a file. Raises OSError if none is."""
    parts = url.split("/")
    wholes = ("/".join(parts[:end]) for end in range(3, len(parts) + 1))
    archive = next((whole for whole in wholes if local_path(whole).is_file()), None)
    if archive is None:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), url)
    return archive


class _OpenMember(OpenFile):
    """A member, open for reading."""

    def __init__(self, archive: Path, begin: int, entry: FileInfo) -> None:
        self._file, self._begin, self._entry = LocalFile(archive), begin, entry

    def stamp(self) -> Stamp:
        return self._entry.stamp()

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
