"""The Python sources in a release's archive. For a wheel, only its directory and the ranges of sources are read."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from tempfile import TemporaryFile
from typing import Any
from zlib import crc32

from tools.api_history.index import Release

BLOCK = 2 << 20
"""Bytes per request. Sources are contiguous in a wheel; libraries between them are skipped."""


class RangedFile(io.RawIOBase):
    """A file on a server, read by byte ranges. The last blocks are cached."""

    def __init__(self, session: Any, url: str, size: int) -> None:
        self._session, self._url, self._size, self._at = session, url, size, 0
        self._blocks: dict[int, bytes] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        block = self._block(self._at // BLOCK) if self._at < self._size else b""
        part = block[self._at % BLOCK :][: len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            first, last = number * BLOCK, min((number + 1) * BLOCK, self._size) - 1
            headers = {"Range": f"bytes={first}-{last}", "Accept-Encoding": "identity"}
            answer = self._session.get(self._url, headers=headers)
            answer.raise_for_status()
            content: bytes = answer.content
            if answer.status_code != 206 and len(content) != last + 1 - first:
                raise OSError(f"the server of {self._url} gives no ranges of bytes")
            if len(self._blocks) >= 4:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[number] = content
        return self._blocks[number]


def sources(
    session: Any, release: Release, wanted: Callable[[str, str], bool]
) -> Iterator[tuple[str, str, bytes | None]]:
    """Path, digest and content of each .py and .pyi of a release, as installed; no content if it is not requested."""
    if release.filename.endswith((".whl", ".zip")):
        with zipfile.ZipFile(
            io.BufferedReader(RangedFile(session, release.url, release.size), 1 << 16)
        ) as wheel:
            for info in sorted(wheel.infolist(), key=lambda info: info.header_offset):
                if info.filename.endswith((".py", ".pyi")):
                    digest = f"{info.CRC:08x}{info.file_size:x}"
                    yield info.filename, digest, wheel.read(info) if wanted(info.filename, digest) else None
        return
    with TemporaryFile() as file:
        answer = session.get(release.url, headers={"Accept-Encoding": "identity"}, stream=True)
        answer.raise_for_status()
        for chunk in answer.iter_content(1 << 20):
            file.write(chunk)
        file.seek(0)
        with tarfile.open(fileobj=file) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.name.endswith((".py", ".pyi")) else None
                if content is not None:
                    path, raw = member.name.split("/", 1)[-1].removeprefix("src/"), content.read()
                    digest = f"{crc32(raw):08x}{len(raw):x}"
                    yield path, digest, raw if wanted(path, digest) else None
