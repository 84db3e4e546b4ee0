"""The zip archives that `torch.save` writes: the position of each member, alone in a file or within a larger one.

Members are stored, not compressed, so a tensor can be read in place. Source: PKWARE's APPNOTE.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from reshard.algebra.storage import Storage
from reshard.base.errors import ReshardError
from reshard.stores import OpenFile, fetch_ahead, is_remote
from reshard.transfer.source_files import MAX_FILE_BYTES

EDGE_BYTES = 2048
"""Bytes read at once from either end of an archive: for a single tensor, enough for everything but its data."""

_END = struct.Struct("<4sHHHHIIH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_U32 = 0xFFFF_FFFF

_TOO_OLD = "torch.save(torch.load(path), path) with torch 1.6 or later rewrites it"
_DAMAGED = "the file is damaged or was cut short: copy or download it again"


def damaged_file(
    file: str,
    code: str,
    message: str,
    *,
    expected: str | None = None,
    found: str | None = None,
    remedy: str = _DAMAGED,
) -> ReshardError:
    """The error for one file that torch did not write like this."""
    return ReshardError(code, message, file=file, expected=expected, found=found, remedy=remedy)


def edges(path: str, offset: int, length: int) -> Iterator[tuple[str, int, int]]:
    """The ranges that a `FileWindow` reads first: both ends, or the complete window if it is short."""
    end, is_short = offset + length, length <= 2 * EDGE_BYTES
    yield path, offset if is_short else end - EDGE_BYTES, end
    if not is_short:
        yield path, offset, offset + EDGE_BYTES


class FileWindow:
    """Positioned reads within `length` bytes at `offset` of a file; both ends are read once and kept."""

    def __init__(self, file: OpenFile, path: str, offset: int, length: int) -> None:
        self.file, self.path, self.offset, self.length = file, path, offset, length
        self._tail_at = next(edges(path, offset, length))[1] - offset
        self._tail = self._fetch(self._tail_at, length - self._tail_at)
        self._head = self._fetch(0, EDGE_BYTES) if self._tail_at else self._tail

    @property
    def name(self) -> str:
        """The file name for messages, with the offset of the archive if it is not 0."""
        return self.path if not self.offset else f"{self.path} (archive at byte {self.offset})"

    def fetch_ahead(self, parts: Iterable[tuple[int, int]]) -> None:
        """Prefetch parts (begin and size) that will be read, if the file is in a store: they are fetched together."""
        if is_remote(self.path):
            far = (
                (at, at + size) for at, size in parts if at < self._tail_at and at + size > len(self._head)
            )
            fetch_ahead((self.path, self.offset + begin, self.offset + end) for begin, end in far)

    def _fetch(self, at: int, size: int) -> bytes:
        content = self.file.read(self.offset + at, max(size, 0))
        if len(content) < size or size < 0:
            raise damaged_file(
                self.path,
                "torch-file-too-short",
                "a file is shorter than it should be",
                expected=f"at least {self.offset + at + max(size, 0)} bytes",
                found=f"{self.file.size} bytes",
            )
        return content

    def read(self, at: int, size: int) -> bytes:
        """Bytes `at` to `at + size` of the window."""
        if size > MAX_FILE_BYTES:
            raise damaged_file(
                self.name,
                "torch-member-too-large",
                "a part of a file is implausibly large",
                expected=f"at most {MAX_FILE_BYTES:,} bytes",
                found=f"{size:,} bytes",
            )
        if at < 0 or size < 0 or at + size > self.length:
            raise damaged_file(
                self.name,
                "torch-file-truncated",
                "a file was cut short",
                expected=f"at least {at + size} bytes",
                found=f"{self.length} bytes",
            )
        if at + size <= len(self._head):
            return self._head[at : at + size]
        if at >= self._tail_at:
            return self._tail[at - self._tail_at : at - self._tail_at + size]
        return self._fetch(at, size)


class _ZipMember(NamedTuple):
    name: bytes
    header: int
    size: int
    crc32: int


class ZipArchive:
    """The members of a zip as torch writes it, by their name below the root."""

    def __init__(self, window: FileWindow) -> None:
        self.window = window
        self._storages: dict[str, Storage] = {}
        self._members = _central_directory(window)
        if b"byteorder" in self._members and (order := self.read("byteorder")) != b"little":
            raise damaged_file(
                window.name,
                "torch-file-big-endian",
                "the numbers of a file are not little-endian",
                expected="little",
                found=order.decode("ascii", "replace"),
                remedy="load and save it with torch on a little-endian machine",
            )
        storages = (member for name, member in self._members.items() if name.startswith(b"data/"))
        window.fetch_ahead(map(_local_header, storages))

    def read(self, name: str) -> bytes:
        """The content of a small member, checked against its CRC32."""
        member = self._member(name)
        content = self.window.read(self._data_at(member), member.size)
        if (computed := zlib.crc32(content)) != member.crc32:
            raise damaged_file(
                self.window.name,
                "torch-checksum-mismatch",
                f"the bytes of {name} do not match its CRC32",
                expected=f"CRC32 {member.crc32:08x}",
                found=f"{computed:08x}",
            )
        return content

    def storage(self, key: str, nbytes: int) -> Storage:
        """The place of the storage `key`. Raises ReshardError if it is shorter than `nbytes` bytes."""
        if key not in self._storages:
            member = self._member(f"data/{key}")
            at = self.window.offset + self._data_at(member)
            self._storages[key] = Storage(self.window.path, at, member.size, member.crc32)
        storage = self._storages[key]
        if storage.nbytes < nbytes:
            raise damaged_file(
                self.window.name,
                "torch-storage-too-short",
                f"storage {key} is shorter than its pickle says",
                expected=f"{nbytes} bytes",
                found=f"{storage.nbytes} bytes",
            )
        return storage

    def _member(self, name: str) -> _ZipMember:
        member = self._members.get(name.encode("utf-8", "surrogatepass"))
        if member is None:
            raise damaged_file(
                self.window.name, "torch-member-missing", f"a file of torch has no member {name}"
            )
        return member

    def _data_at(self, member: _ZipMember) -> int:
        """The offset of a member's content, after its local header: only that header records its own padding."""
        raw = self.window.read(*_local_header(member))
        signature, *_, name_size, extra_size = _LOCAL.unpack_from(raw)
        if signature != b"PK\x03\x04" or raw[_LOCAL.size :] != member.name or name_size != len(member.name):
            raise damaged_file(
                self.window.name,
                "torch-member-misplaced",
                "a member of the archive is not where the central directory says",
                expected=f"{member.name.decode('utf-8', 'replace')} at byte {member.header}",
            )
        begin = member.header + int(_LOCAL.size + name_size + extra_size)
        if begin + member.size > self.window.length:
            raise damaged_file(
                self.window.name,
                "torch-member-past-end",
                f"{member.name.decode('utf-8', 'replace')} reaches past the end of the file",
                expected=f"at least {begin + member.size} bytes",
                found=f"{self.window.length} bytes",
            )
        return begin


def _local_header(member: _ZipMember) -> tuple[int, int]:
    """The offset of a member's header, and its size without padding."""
    return member.header, _LOCAL.size + len(member.name)


def _central_directory(window: FileWindow) -> dict[bytes, _ZipMember]:
    """All members by their name below the root, which is the first component that all names share."""
    count, size, at = _end_of_directory(window)
    raw = window.read(at, size)
    members: dict[bytes, _ZipMember] = {}
    position = 0
    try:
        for _ in range(count):
            member, position = _entry(window, raw, position)
            members[member.name.partition(b"/")[2]] = member
    except struct.error:
        raise damaged_file(
            window.name, "torch-directory-damaged", "the central directory of the archive is damaged"
        ) from None
    return members


def _entry(window: FileWindow, raw: bytes, at: int) -> tuple[_ZipMember, int]:
    """One entry of the central directory, and the offset of the next."""
    (
        signature,
        _,
        _,
        flags,
        method,
        _,
        _,
        crc,
        packed,
        size,
        name_size,
        extra_size,
        note_size,
        _,
        _,
        _,
        header,
    ) = _ENTRY.unpack_from(raw, at)
    begin = at + _ENTRY.size
    name = raw[begin : begin + name_size]
    if signature != b"PK\x01\x02" or len(name) != name_size:
        raise damaged_file(
            window.name, "torch-directory-damaged", "the central directory of the archive is damaged"
        )
    if _U32 in (packed, size, header):
        extra = raw[begin + name_size : begin + name_size + extra_size]
        size, packed, header = _zip64_fields(extra, size, packed, header)
    if method or flags & 1 or packed != size:
        raise damaged_file(
            window.name,
            "torch-member-compressed",
            f"{name.decode('utf-8', 'replace')} is compressed or encrypted",
            expected="uncompressed members, as torch writes them",
            remedy="unpack the archive, and pack it again with `zip -0` or save it again with torch",
        )
    return _ZipMember(name, header, size, crc), begin + name_size + extra_size + note_size


def _zip64_fields(extra: bytes, *fields: int) -> list[int]:
    """`fields` with values that do not fit in 32 bits taken from the zip64 part of `extra`, in order."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{size // 8}Q", extra, at + 4))
            return [next(wide, field) if field == _U32 else field for field in fields]
        at += 4 + size
    return list(fields)


def _end_of_directory(window: FileWindow) -> tuple[int, int, int]:
    """The number of entries in the central directory, its size, and its offset."""
    tail_size = min(window.length, EDGE_BYTES)
    tail = window.read(window.length - tail_size, tail_size)
    begin = tail.rfind(b"PK\x05\x06")
    if begin < 0 or len(tail) - begin < _END.size:
        raise _no_zip(window)
    end = window.length - tail_size + begin
    _, _, _, _, count, size, at, _ = _END.unpack_from(tail, begin)
    if end >= _END64_LOCATOR.size:
        raw = window.read(end - _END64_LOCATOR.size, _END64_LOCATOR.size)
        signature, _, end64, _ = _END64_LOCATOR.unpack(raw)
        if signature == b"PK\x06\x07":
            raw = window.read(end64, _END64.size)
            signature, *_, count, size, at = _END64.unpack(raw)
            if signature != b"PK\x06\x06":
                raise damaged_file(
                    window.name, "torch-archive-end-damaged", "the end of the archive is damaged"
                )
    return count, size, at


def _no_zip(window: FileWindow) -> ReshardError:
    """The error for a file without a central directory at its end."""
    head = window.read(0, min(window.length, 512))
    if head.startswith(b"PK\x03\x04"):
        return damaged_file(
            window.name,
            "torch-file-truncated",
            "a file was cut short",
            expected="the central directory of the archive at its end",
            found=f"none in {window.length} bytes",
        )
    if head.startswith(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19") or head[257:262] == b"ustar":
        return damaged_file(
            window.name,
            "torch-file-too-old",
            "a file is in the format of torch before 1.6",
            expected="the zip format",
            found="the legacy format",
            remedy=_TOO_OLD,
        )
    if head.startswith(b"version https://git-lfs"):
        return damaged_file(
            window.name,
            "git-lfs-pointer",
            "a file is a Git LFS pointer, not the content itself",
            expected="a file of torch.save",
            found=f"{window.length} bytes of text",
            remedy="fetch the content with `git lfs pull`",
        )
    if head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") < 1 << 32:
        return damaged_file(
            window.name,
            "torch-file-is-safetensors",
            "a file is in the format of safetensors, under the name of a file of torch.save",
            expected="a zip archive",
            found="a header of safetensors",
            remedy="if torch's DCP wrote it with SerializationFormat.SAFETENSORS, save the checkpoint again without "
            "it, or with HuggingFaceStorageWriter; else give the file the suffix .safetensors",
        )
    return damaged_file(
        window.name,
        "not-torch-file",
        "not a file of torch.save",
        expected="a zip archive",
        found=f"{window.length} bytes that begin with {head[:8]!r}" if head else "an empty file",
    )
