"""The members of an uncompressed tar archive: their names, and where their bytes are.

Each member is a header of 512 bytes, and its content, padded to as many. Longer names are in a member before it: of
type `x` in pax archives, of type `L` in GNU's. Sources: POSIX's description of pax, and GNU tar's manual; archives that
Python's tarfile and GNU tar wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from reshard.base.errors import ReshardError
from reshard.stores.open_file import OpenFile

BLOCK_BYTES = 512
MAGIC = slice(257, 262), b"ustar"
MAX_NAME_BYTES = 1 << 20
"""Most bytes of a name, or of the attributes of a member."""

_OCTAL, _DECIMAL = re.compile(rb"[0-7]{1,12}"), re.compile(rb"\d{1,18}")

REGULAR, LONG_NAME, ATTRIBUTES = b"0\x007", b"L", b"x"
LINK = b"1"
"""Types of members. A link has the content of an earlier member; other types have none that is read."""


class TarMember(NamedTuple):
    """A file in the archive, by its path without a leading `./`, and where it is. A `link` names an earlier one."""

    name: str
    offset: int
    size: int
    link: str = ""


def is_tar(begin: bytes) -> bool:
    """Whether a file that begins with these bytes is a tar archive that is not compressed."""
    return begin[MAGIC[0]] == MAGIC[1]


def read_members(file: OpenFile, name: str) -> Iterator[TarMember]:
    """All files in an archive called `name`, in their order; empty blocks are its end.

    Raises ReshardError if it is damaged or cut short.
    """
    at, end = 0, file.size
    attributes: dict[str, str] = {}
    while True:
        header = file.read(at, BLOCK_BYTES)
        if len(header) < BLOCK_BYTES:
            raise _cut_short(name, at + 2 * BLOCK_BYTES, end)
        if not header.strip(b"\0"):
            return
        kind, size = header[156:157], _size(header, at, name)
        size = int(attributes.get("size", size))
        begin, at = at + BLOCK_BYTES, at + BLOCK_BYTES + -(-size // BLOCK_BYTES) * BLOCK_BYTES
        if begin + size > end:
            raise _cut_short(name, begin + size, end)
        if kind in (LONG_NAME, ATTRIBUTES):
            attributes |= _attributes(kind, _content(file, begin, size, name))
            continue
        path = _path(attributes.get("path") or _name(header))
        if path and "GNU.sparse.major" in attributes:
            raise _damaged(name, path, "a file stored completely", "a sparse file")
        if path and kind in LINK:
            yield TarMember(path, begin, size, _path(attributes.get("linkpath") or _text(header[157:257])))
        elif path and kind in REGULAR:
            yield TarMember(path, begin, size)
        attributes = {}


def _content(file: OpenFile, begin: int, size: int, name: str) -> bytes:
    if size > MAX_NAME_BYTES:
        raise _damaged(
            name, f"byte {begin}", f"at most {MAX_NAME_BYTES:,} bytes of attributes", f"{size:,} bytes"
        )
    return file.read(begin, size)


def _size(header: bytes, at: int, name: str) -> int:
    """The size of a member: octal digits, or, if the first bit is set, a number in base 256."""
    checksum = header[148:156].strip(b" \0")
    summed = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    if not _OCTAL.fullmatch(checksum) or int(checksum, 8) != summed:
        raise _damaged(name, f"byte {at:,}", "a header with its checksum", repr(header[:16]))
    field = header[124:136]
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if digits and not _OCTAL.fullmatch(digits):
        raise _damaged(name, f"byte {at:,}", "a size in octal digits", repr(field))
    return int(digits or b"0", 8)


def _name(header: bytes) -> str:
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{_text(header[:100])}" if prefix else _text(header[:100])


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _path(name: str) -> str:
    """The path of a member below the archive; "" for the archive itself, and for what is not below it."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return "" if name.startswith("/") or ".." in parts else "/".join(parts)


def _attributes(kind: bytes, content: bytes) -> dict[str, str]:
    """What a member says of the next one."""
    if kind == LONG_NAME:
        return {"path": _text(content)}
    attributes = {}
    while content:
        length, _, rest = content.partition(b" ")
        if not _DECIMAL.fullmatch(length) or not len(length) < int(length) <= len(content):
            break
        record, content = rest[: int(length) - len(length) - 2], content[int(length) :]
        key, _, value = record.partition(b"=")
        attributes[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
    if not _DECIMAL.fullmatch(attributes.get("size", "0").encode("utf-8", "replace")):
        del attributes["size"]
    return attributes


def _cut_short(name: str, expected: int, found: int) -> ReshardError:
    return ReshardError(
        "archive-truncated",
        "an archive was cut short",
        file=name,
        expected=f"at least {expected:,} bytes",
        found=f"{found:,} bytes",
        remedy="copy or download the archive again",
    )


def _damaged(name: str, where: str, expected: str, found: str) -> ReshardError:
    return ReshardError(
        "archive-damaged",
        "an archive is damaged, or stored in a way that cannot be read in place",
        file=name,
        expected=expected,
        found=f"{found} at {where}",
        remedy="copy the archive again; if tar reads it, unpack it (tar -xf) and pass the folder",
    )
