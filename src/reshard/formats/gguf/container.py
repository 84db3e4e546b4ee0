"""The GGUF container: metadata, the infos of tensors, and their data, each aligned.

    magic "GGUF", version, numbers of tensors and of values; the values; name, dimensions (innermost first), type and
    offset of each tensor; padding; the data

Source: `ggml/src/gguf.cpp` and `gguf-py/gguf/gguf_writer.py` of llama.cpp, as of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.codecs.gguf_types import TENSOR_TYPES, TensorType
from reshard.formats.detection import GGUF_MAGIC
from reshard.formats.gguf.value_types import Metadata, Value, ValueType
from reshard.stores import OpenFile
from reshard.transfer.source_files import Sources

VERSION = 3
ALIGNMENT, ALIGNED_AS = 32, "general.alignment"
HEADER_MOST = 64 << 20
"""Most bytes of the metadata and the infos of tensors: several times those of the largest vocabularies."""
MOST_AXES = 4
MOST_VALUES, MOST_TENSORS = 1 << 12, 1 << 17
"""Most values and tensors of a file: each takes microseconds. Models have tens of values, and tensors by the layer."""
READ_AT_ONCE = 1 << 20
COPY_AGAIN = "copy or download the file again"

_NUMBERS = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}

_LENGTH = struct.Struct("<Q")


class TensorInfo(NamedTuple):
    """A tensor of a file: its type, its shape (outermost axis first), and where its data is in the file."""

    kind: TensorType
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return self.kind.size(self.shape)


class GgufContent(NamedTuple):
    """What a file contains, without the data."""

    metadata: Metadata
    infos: dict[str, TensorInfo]


class _InvalidError(ValueError):
    """What is wrong in a header, in words."""


class _CutError(Exception):
    """The file ends inside its header."""


class _Cursor:
    """Reads a file from its beginning."""

    def __init__(self, file: OpenFile) -> None:
        self._file, self._size = file, file.size
        self._buffer = b""
        self._begin = 0
        self.at = 0

    def take(self, count: int) -> bytes:
        """The next bytes."""
        end = self.at + count
        if end > self._size:
            raise _CutError
        if end > HEADER_MOST:
            raise _InvalidError(f"metadata of more than {HEADER_MOST:,} bytes")
        if end > self._begin + len(self._buffer):
            wanted = min(max(count, READ_AT_ONCE), self._size - self.at)
            self._buffer, self._begin = self._file.read(self.at, wanted), self.at
        first = self.at - self._begin
        self.at = end
        return self._buffer[first : first + count]

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def text(self) -> str | bytes:
        return _decoded(self.take(self.number("Q")))

    def texts(self, count: int) -> list[str | bytes]:
        """So many strings. Those that are complete in the buffer are decoded without a call for each."""
        texts: list[str | bytes] = []
        while len(texts) < count:
            texts += self._buffered_texts(count - len(texts))
            if len(texts) < count:
                texts.append(self.text())
        return texts

    def _buffered_texts(self, most: int) -> Iterator[str | bytes]:
        buffer, at = self._buffer, self.at - self._begin
        for _ in range(most):
            begin = at + _LENGTH.size
            if begin > len(buffer):
                break
            end = begin + _LENGTH.unpack_from(buffer, at)[0]
            if end > len(buffer):
                break
            yield _decoded(buffer[begin:end])
            at = end
        self.at = self._begin + at

    def name(self) -> str:
        name = self.text()
        if not isinstance(name, str):
            raise _InvalidError(f"a name that is not UTF-8: {name[:80]!r}")
        return name

    def type(self) -> ValueType:
        number = self.number("I")
        try:
            return ValueType(number)
        except ValueError:
            raise _InvalidError(f"a value of the unknown type {number}") from None

    def value(self) -> Value:
        kind = self.type()
        if kind != ValueType.ARRAY:
            return Value(kind, self.text() if kind == ValueType.STRING else self.number(_NUMBERS[kind]))
        item, count = self.type(), self.number("Q")
        if item == ValueType.ARRAY:
            raise _InvalidError("an array of arrays")
        if item == ValueType.STRING:
            return Value(kind, self.texts(count), item)
        form = _NUMBERS[item]
        content = self.take(count * struct.calcsize(f"<{form}"))
        return Value(kind, np.frombuffer(content, f"<{form}").tolist(), item)


def _decoded(content: bytes) -> str | bytes:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content


def read(path: Path, sources: Sources) -> GgufContent:
    """The content of a file. Raises ReshardError naming all tensors that are not in it."""
    with sources.open(path) as file:
        try:
            content = _parsed(_Cursor(file), path)
        except _CutError:
            raise _cut(path, "all of its metadata", f"{file.size:,} bytes") from None
        except (_InvalidError, MemoryError) as error:
            raise ReshardError(
                "gguf-header-invalid",
                "a GGUF file has an invalid header",
                file=str(path),
                expected="values and tensors as llama.cpp writes them, each with a name of its own",
                found=str(error) or "a size beyond all memory",
                remedy=COPY_AGAIN,
            ) from None
        raise_all(_misplaced(content.infos, file.size, path))
    return content


def _parsed(cursor: _Cursor, path: Path) -> GgufContent:
    if cursor.take(len(GGUF_MAGIC)) != GGUF_MAGIC:
        raise _InvalidError("another beginning than GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        raise _other_version(path, version)
    tensors, values = cursor.number("Q"), cursor.number("Q")
    if values > MOST_VALUES or tensors > MOST_TENSORS:
        raise _InvalidError(
            f"{values:,} values and {tensors:,} tensors, of at most {MOST_VALUES:,} and {MOST_TENSORS:,}"
        )
    metadata: dict[str, Value] = {}
    for _ in range(values):
        key = cursor.name()
        if key in metadata:
            raise _InvalidError(f"{key} twice")
        metadata[key] = cursor.value()
    alignment = metadata.get(ALIGNED_AS, Value(ValueType.UINT32, ALIGNMENT)).value
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _InvalidError(f"{ALIGNED_AS} {alignment!r}, which is no power of two")
    infos: dict[str, TensorInfo] = {}
    for _ in range(tensors):
        name = cursor.name()
        if name in infos:
            raise _InvalidError(f"the tensor {name} twice")
        infos[name] = _info(cursor, name)
    begin = padded(cursor.at, alignment)
    return GgufContent(
        metadata, {name: info._replace(offset=begin + info.offset) for name, info in infos.items()}
    )


def _info(cursor: _Cursor, name: str) -> TensorInfo:
    axes = cursor.number("I")
    if axes > MOST_AXES:
        raise _InvalidError(f"{name} with {axes} axes")
    shape = tuple(reversed([cursor.number("Q") for _ in range(axes)]))
    number, offset = cursor.number("I"), cursor.number("Q")
    kind = TENSOR_TYPES.get(number, TensorType(f"type {number}", number, 1, 0))
    if prod(shape) >= 1 << 60 or offset >= 1 << 60:
        raise _InvalidError(f"{name} {list(shape)} at byte {offset}, which is beyond any file")
    if not kind.divides(shape):
        raise _InvalidError(
            f"{name} {list(shape)} in {kind.name}, whose blocks have {kind.elements} elements"
        )
    return TensorInfo(kind, shape, offset)


def _misplaced(infos: dict[str, TensorInfo], size: int, path: Path) -> Iterator[Problem]:
    """Problems of tensors that overlap, and of a file that ends before them."""
    end, last = 0, ""
    for name, info in sorted(infos.items(), key=lambda item: item[1].offset):
        if info.offset < end and info.nbytes:
            yield Problem(
                "gguf-header-invalid",
                "a GGUF file has an invalid header",
                tensor=name,
                file=str(path),
                rule="the data of tensors does not overlap",
                found=f"it begins at byte {info.offset:,}, and {last} ends at byte {end:,}",
                remedy=COPY_AGAIN,
            )
        end, last = max(end, info.offset + info.nbytes), name
    if end > size:
        beyond = [name for name, info in infos.items() if info.offset + info.nbytes > size]
        yield from _cut(
            path, f"{end:,} bytes", f"{size:,} bytes, without {len(beyond)} of {len(infos)} tensors"
        ).problems


def _cut(path: Path, expected: str, found: str) -> ReshardError:
    return ReshardError(
        "gguf-truncated",
        "a GGUF file is cut short",
        file=str(path),
        rule="the header says where the data of each tensor is",
        expected=expected,
        found=found,
        remedy=COPY_AGAIN,
    )


def _other_version(path: Path, version: int) -> ReshardError:
    is_big = version & 0xFFFF == 0
    return ReshardError(
        "gguf-version-unsupported",
        "this GGUF file has another version than reshard reads",
        file=str(path),
        expected="version 2 or 3, little-endian",
        found="a big-endian file" if is_big else f"version {version}",
        remedy="convert it with gguf_convert_endian.py of llama.cpp"
        if is_big
        else "convert the model that it was made from again, with a newer llama.cpp",
    )


def padded(size: int, alignment: int = ALIGNMENT) -> int:
    """A size, or an offset, rounded up."""
    return -(-size // alignment) * alignment


def header(
    metadata: Metadata, infos: Iterable[tuple[str, TensorType, Sequence[int]]]
) -> tuple[bytes, list[int]]:
    """The first bytes of a file with these tensors, and the offset of each in the file."""
    infos = list(infos)
    parts = [GGUF_MAGIC, struct.pack("<IQQ", VERSION, len(infos), len(metadata))]
    for key, value in metadata.items():
        parts += [_text(key), struct.pack("<I", value.type), _packed(value)]
    offsets, end = [], 0
    for name, kind, shape in infos:
        axes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts += [_text(name), axes, struct.pack("<IQ", kind.number, end)]
        offsets.append(end)
        end += padded(kind.size(tuple(shape)))
    content = b"".join(parts)
    content += bytes(padded(len(content)) - len(content))
    return content, [len(content) + offset for offset in offsets]


def _text(text: str | bytes) -> bytes:
    content = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(content)) + content


def _packed(value: Value) -> bytes:
    if value.type == ValueType.STRING:
        return _text(value.value)
    if value.type != ValueType.ARRAY:
        return struct.pack(f"<{_NUMBERS[value.type]}", value.value)
    assert value.item is not None
    begin = struct.pack("<IQ", value.item, len(value.value))
    if value.item == ValueType.STRING:
        return begin + b"".join(map(_text, value.value))
    return begin + struct.pack(f"<{len(value.value)}{_NUMBERS[value.item]}", *value.value)
