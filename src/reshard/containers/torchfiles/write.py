"""Lay out torch.save files before the bytes of any tensor are known.

The layout is that of torch 2.13: the same members in the same order, each with its padding and its data descriptor, so
that any reader of torch's files can read these. Where torch writes the CRC32 of a storage, an image has a hole, which
is filled after the bytes have been copied. Sources: `torch/serialization.py`, PKWARE's APPNOTE for zip64, and files
that torch wrote.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from reshard.algebra.dtypes import DType
from reshard.containers.torchfiles.pickles import Global, Persistent, Pickler, Reduce

ROOT = "archive"
"""The folder of all members; torch uses this name whenever it writes to a stream."""

ALIGNMENT = 64
_U32 = 0xFFFF_FFFF
_DESCRIPTOR_FLAG, _UTF8_FLAG = 0x0008, 0x0800
_CRC_IN_DESCRIPTOR = 4
_CRC_IN_ENTRY = 16


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A contiguous tensor to write; tensors with an equal `key` share one storage.

    A `repeated` one stores a single element for all places, like torch's `Tensor.expand`.
    """

    key: Hashable
    dtype: DType
    shape: tuple[int, ...]
    repeated: bool = False

    @property
    def stored(self) -> int:
        """The number of elements in its storage."""
        return 1 if self.repeated else prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of its storage in bytes."""
        return self.stored * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in elements of its storage."""
        step = 0 if self.repeated else 1
        return tuple(step * prod(max(n, 1) for n in self.shape[i + 1 :]) for i in range(len(self.shape)))


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """The place of the tensor `key`: `nbytes` bytes at `offset`.

    `crc_at` are the places of its CRC32, each four bytes, little-endian. All offsets count from the beginning of the
    image.
    """

    key: Any
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    crc_at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FileImage:
    """A file of `size` bytes: `literals` are (offset, bytes), the rest are the slots of its tensors."""

    size: int
    literals: tuple[tuple[int, bytes], ...]
    slots: tuple[TensorSlot, ...]


def layout_torch_file(content: Any) -> FileImage:
    """The image of `torch.save(content)`; tensors in `content` are `NewTensor`s.

    It supports the types of `pickles.Pickler`. Raises TypeError for anything else.
    """
    pickler = _TorchPickler()
    pickler.write(content)
    pickled = pickler.finish()
    archive = _ZipLayout()
    archive.add("data.pkl", pickled)
    archive.add(".format_version", b"1")
    archive.add(".storage_alignment", str(ALIGNMENT).encode())
    archive.add("byteorder", b"little")
    for index, tensor in enumerate(pickler.storages.values()):
        archive.add_slot(f"data/{index}", tensor)
    archive.add("version", b"3\n")
    archive.add(".data/serialization_id", _serialization_id(pickled))
    return archive.finish()


def image_bytes(image: FileImage, contents: Mapping[Hashable, bytes] = MappingProxyType({})) -> bytes:
    """The complete file. `contents` has the bytes of each tensor, by key. Raises ValueError if any are missing."""
    image = filled(image, contents)
    for slot in image.slots:
        if slot.nbytes:
            raise ValueError(
                f"the image has tensors, whose bytes are not known: {slot.key!r} has {slot.nbytes}"
            )
    whole = bytearray(image.size)
    for offset, content in image.literals:
        whole[offset : offset + len(content)] = content
    return bytes(whole)


def filled(image: FileImage, contents: Mapping[Hashable, bytes]) -> FileImage:
    """The image with the bytes of the tensors in `contents` as literals. Raises ValueError if one has another size."""
    starts = [offset for offset, _ in image.literals]
    texts = [bytearray(text) for _, text in image.literals]
    known = []
    for slot in image.slots:
        content = contents.get(slot.key)
        if content is None:
            continue
        if len(content) != slot.nbytes:
            raise ValueError(f"{slot.key!r} has {slot.nbytes} bytes, not {len(content)}")
        known.append((slot.offset, content))
        for place in slot.crc_at:
            at = bisect_right(starts, place) - 1
            struct.pack_into("<I", texts[at], place - starts[at], zlib.crc32(content))
    literals = sorted([*zip(starts, map(bytes, texts), strict=True), *known])
    return FileImage(image.size, tuple(literals), tuple(s for s in image.slots if s.key not in contents))


def _serialization_id(pickled: bytes) -> bytes:
    """Forty digits. torch computes them from all CRC32s, to identify files in its log, and never checks them."""
    return str(int.from_bytes(sha256(pickled).digest()[:16], "little")).zfill(40).encode()


class _TorchPickler(Pickler):
    """Writes a `NewTensor` like torch writes a tensor; `storages` has the tensors by key, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[Hashable, NewTensor] = {}
        self._numbers: dict[Hashable, str] = {}
        self._writers[NewTensor] = self._tensor

    def _tensor(self, tensor: NewTensor) -> None:
        known = self.storages.setdefault(tensor.key, tensor)
        if known.nbytes != tensor.nbytes:
            raise ValueError(f"{tensor.key!r} is two tensors of different sizes")
        number = self._numbers.setdefault(tensor.key, str(len(self._numbers)))
        hooks = Reduce(Global("collections", "OrderedDict"))
        if tensor.dtype.storage:
            kind = Global("torch", tensor.dtype.storage)
            storage = Persistent(("storage", kind, number, "cpu", tensor.stored))
            arguments = (storage, 0, tensor.shape, tensor.strides, False, hooks)
            self.write(Reduce(Global("torch._utils", "_rebuild_tensor_v2"), arguments))
        else:
            kind = Global("torch.storage", "UntypedStorage")
            storage = Persistent(("storage", kind, number, "cpu", tensor.nbytes))
            typed = (storage, 0, tensor.shape, tensor.strides, False, hooks, tensor.dtype)
            self.write(Reduce(Global("torch._utils", "_rebuild_tensor_v3"), typed))


class _PlacedMember(NamedTuple):
    """A member with its position."""

    name: bytes
    header: int
    size: int
    crc32: int
    slot: bool


class _ZipLayout:
    """A zip that is built member by member; `_text` are the bytes since the last slot."""

    def __init__(self) -> None:
        self._size = 0
        self._text = bytearray()
        self._literals: list[tuple[int, bytes]] = []
        self._entries: list[_PlacedMember] = []
        self._tensors: list[tuple[NewTensor, int, list[int]]] = []

    def add(self, name: str, content: bytes) -> None:
        """Append a member with known content."""
        entry = self._begin(name, len(content), zlib.crc32(content), slot=False)
        self._put(content)
        self._put(_descriptor(entry))

    def add_slot(self, name: str, tensor: NewTensor) -> None:
        """Append a member for the bytes of a tensor, with holes for its CRC32."""
        entry = self._begin(name, tensor.nbytes, 0, slot=tensor.nbytes > 0)
        offset = self._size
        crc_at = []
        if tensor.nbytes:
            self._flush()
            self._size += tensor.nbytes
            crc_at.append(self._size + _CRC_IN_DESCRIPTOR)
            self._put(_descriptor(entry))
        self._tensors.append((tensor, offset, crc_at))

    def finish(self) -> FileImage:
        """Append the central directory, and return the finished image."""
        begin = self._size
        holes = iter(crc_at for tensor, _, crc_at in self._tensors if tensor.nbytes)
        for entry in self._entries:
            if entry.slot:
                next(holes).append(self._size + _CRC_IN_ENTRY)
            self._put(_central_entry(entry))
        self._put(_end_of_archive(len(self._entries), begin, self._size))
        self._flush()
        slots = tuple(
            TensorSlot(tensor.key, tensor.dtype, tensor.shape, offset, tensor.nbytes, tuple(crc_at))
            for tensor, offset, crc_at in self._tensors
        )
        return FileImage(self._size, tuple(self._literals), slots)

    def _begin(self, name: str, size: int, crc32: int, *, slot: bool) -> _PlacedMember:
        entry = _PlacedMember(f"{ROOT}/{name}".encode(), self._size, size, crc32, slot)
        self._entries.append(entry)
        self._put(_local_header(entry))
        return entry

    def _put(self, content: bytes) -> None:
        self._text += content
        self._size += len(content)

    def _flush(self) -> None:
        if self._text:
            self._literals.append((self._size - len(self._text), bytes(self._text)))
            self._text.clear()


def _flags(entry: _PlacedMember) -> int:
    return _UTF8_FLAG | (_DESCRIPTOR_FLAG if entry.size else 0)


def _zip64(entry: _PlacedMember) -> bytes:
    """The extra field with values that do not fit in 32 bits: both sizes, the offset of the header."""
    fields = [entry.size, entry.size] if entry.size >= _U32 else []
    if entry.header >= _U32:
        fields.append(entry.header)
    return struct.pack(f"<HH{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""


def _local_header(entry: _PlacedMember) -> bytes:
    """The header; padding in an extra field "FB" aligns the content after it."""
    extra = _zip64(entry)
    end = entry.header + 30 + len(entry.name) + len(extra) + 4
    padding = -end % ALIGNMENT
    extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    fields = (b"PK\x03\x04", 0, _flags(entry), 0, 0, 0, 0, 0, 0, len(entry.name), len(extra))
    return struct.pack("<4sHHHHHIIIHH", *fields) + entry.name + extra


def _descriptor(entry: _PlacedMember) -> bytes:
    """The data descriptor after the content of a member; an empty member has none."""
    if not entry.size:
        return b""
    sizes = "QQ" if _zip64(entry) else "II"
    return struct.pack(f"<4sI{sizes}", b"PK\x07\x08", entry.crc32, entry.size, entry.size)


def _central_entry(entry: _PlacedMember) -> bytes:
    extra = _zip64(entry)
    size, header = min(entry.size, _U32), min(entry.header, _U32)
    fields = (b"PK\x01\x02", 0, 0, _flags(entry), 0, 0, 0, entry.crc32, size, size)
    rest = (len(entry.name), len(extra), 0, 0, 0, 0, header)
    return struct.pack("<4sHHHHHHIIIHHHHHII", *fields, *rest) + entry.name + extra


def _end_of_archive(count: int, begin: int, end: int) -> bytes:
    """The 64-bit end of the archive, its locator, and the 32-bit end, as torch always writes them."""
    size = end - begin
    wide = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 0x031E, 45, 0, 0, count, count, size, begin)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
    narrow = (min(count, 0xFFFF), min(count, 0xFFFF), min(size, _U32), min(begin, _U32))
    return wide + locator + struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, *narrow, 0)
