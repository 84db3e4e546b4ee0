"""The `.metadata` of torch's distributed checkpoints: the file and offset of each chunk of each tensor.

It is a pickled `torch.distributed.checkpoint.metadata.Metadata`. Megatron-Core's torch_dist format has the same file,
and also stores its save plans in it, which are not needed. Sources: `metadata.py` and `filesystem.py` in
`torch/distributed/checkpoint` of torch 2.4 to 2.13, OLMo-core 3.0.0, and files that these wrote.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from reshard.algebra.dtypes import DType
from reshard.base.errors import UNUSABLE, Problem, ReshardError, raise_all, type_and_message
from reshard.containers.file_names import path_below
from reshard.containers.torchfiles.pickles import Global, Opaque, Pickler, Reduce, encode_int, loads
from reshard.containers.torchfiles.untrusted import damaged_pickle, element_type, shape_of, sizes, text
from reshard.stores import as_path
from reshard.transfer.source_files import Sources

METADATA_MODULE = "torch.distributed.checkpoint.metadata"
STORAGE_MODULE = "torch.distributed.checkpoint.filesystem"
OLMO_CORE = "olmo_core.distributed.checkpoint.filesystem._StorageInfo"
"""The class of OLMo-core's own writer, with the same attributes as torch's."""

OPEN, CLOSE = b")\x81}(", b"ub"
"""Opcodes: instantiate the class on the stack and begin the dict of its attributes; end it."""

_COPY_AGAIN = "copy it again from where it was saved, with its hidden files (cp -r FOLDER, not FOLDER/*)"


class DcpChunk(NamedTuple):
    """A box of a tensor, stored by `torch.save` at bytes `offset` to `offset + length` of `file`.

    `file` is a path when reading, and relative to the folder of `.metadata` when writing. An object that is not a
    tensor has a chunk too, without `offsets` and `sizes`.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass
class DcpTensor:
    """A complete tensor and its chunks."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: list[DcpChunk]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def chunk_spans(tensors: Iterable[DcpTensor]) -> Iterator[tuple[str, int, int]]:
    """File, offset and length of all chunks, tensor by tensor."""
    for tensor in tensors:
        yield from ((chunk.file, chunk.offset, chunk.length) for chunk in tensor.chunks)


@dataclass
class DcpMetadata:
    """The content of `.metadata`. `planner_data` maps each key to its path in the nested state dict, if known."""

    tensors: dict[str, DcpTensor]
    objects: dict[str, DcpChunk]
    planner_data: dict[str, tuple[Any, ...]] | None = None


def read_metadata(path: Path, sources: Sources) -> DcpMetadata:
    """Read the file `.metadata`, and check that every file it names exists and is long enough.

    Raises ReshardError for a missing or damaged `.metadata`; for missing or short files, listing all.
    """
    try:
        content = sources.read(path)
    except OSError as error:
        raise ReshardError(
            "dcp-metadata-unreadable",
            "the metadata of a distributed checkpoint cannot be read",
            file=str(path),
            found=error.strerror,
            remedy=f"either the save did not finish or the checkpoint was copied incompletely: {_COPY_AGAIN}",
        ) from None
    loaded = loads(content, str(path), rebuild=_record_classes())
    del content
    try:
        metadata, problems = _MetadataReader(path, loaded.state).read()
    except UNUSABLE as error:
        raise damaged_pickle(str(path), type_and_message(error)) from None
    problems += _file_problems(path.parent, metadata)
    raise_all(problems)
    return metadata


class _MetadataIndex:
    """A `MetadataIndex`; there is one for each chunk."""

    __slots__ = ("fqn", "offset")

    def __setstate__(self, state: dict[str, Any]) -> None:
        offset = state.get("offset")
        self.fqn = text(state["fqn"])
        self.offset = None if offset is None else shape_of(offset)


class _StorageInfo:
    """A `_StorageInfo`."""

    __slots__ = ("length", "offset", "path", "transforms")

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = text(state["relative_path"])
        self.offset = state["offset"]
        self.length = state["length"]
        self.transforms = state.get("transform_descriptors")


class _ChunkStorage:
    """A `ChunkStorageMetadata`."""

    __slots__ = ("offsets", "sizes")

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.offsets = state["offsets"]
        self.sizes = state["sizes"]


def _record_classes() -> dict[str, type]:
    """Small classes for records that number hundreds of thousands; new for each load, since a pickle can alter them."""
    records = {
        f"{METADATA_MODULE}.MetadataIndex": _MetadataIndex,
        f"{METADATA_MODULE}.ChunkStorageMetadata": _ChunkStorage,
        **dict.fromkeys((f"{STORAGE_MODULE}._StorageInfo", OLMO_CORE), _StorageInfo),
    }
    return {name: type(cls.__name__, (cls,), {"__slots__": ()}) for name, cls in records.items()}


class _MetadataReader:
    """Joins the two tables of a `Metadata`: boxes of tensors, and their places in files."""

    def __init__(self, path: Path, state: dict[str, Any]) -> None:
        self._path = path
        self._state = state
        self._problems: list[Problem] = []
        self._files: dict[str, str] = {}
        self._places = {(index.fqn, index.offset): place for index, place in state["storage_data"].items()}

    def read(self) -> tuple[DcpMetadata, list[Problem]]:
        """The metadata, and its problems."""
        paths = self._state.get("planner_data")
        known = (
            {key: path for key, path in paths.items() if _is_path(path)} if isinstance(paths, dict) else None
        )
        metadata = DcpMetadata({}, {}, known)
        for key, entry in self._state["state_dict_metadata"].items():
            if entry.name == "TensorStorageMetadata":
                metadata.tensors[key] = self._tensor(key, entry.state)
            elif chunk := self._chunk(key, None, (), ()):
                metadata.objects[key] = chunk
        return metadata, self._problems

    def _tensor(self, key: str, state: dict[str, Any]) -> DcpTensor:
        dtype, *_ = state["properties"].state
        shape = shape_of(state["size"])
        if isinstance(dtype, type) and issubclass(dtype, Opaque):
            self._problems.append(
                Problem(
                    "dtype-unknown",
                    "unknown element type",
                    tensor=key,
                    file=str(self._path),
                    found=dtype.name,
                )
            )
        else:
            element_type(dtype)
        chunks = []
        for box in state["chunks"]:
            offsets, size = shape_of(box.offsets), shape_of(box.sizes)
            if 0 in size and (key, offsets) not in self._places:
                continue
            ends = [low + length for low, length in zip(offsets, size, strict=True)]
            if any(end > length for end, length in zip(ends, shape, strict=True)):
                raise ValueError(f"a chunk of {key} at {offsets} is outside the tensor's shape {shape}")
            if chunk := self._chunk(key, offsets, offsets, size):
                chunks.append(chunk)
        return DcpTensor(dtype, shape, chunks)

    def _chunk(
        self, key: str, at: tuple[int, ...] | None, offsets: tuple[int, ...], size: tuple[int, ...]
    ) -> DcpChunk | None:
        place = self._places.get((key, at))
        if place is None:
            self._problems.append(
                Problem(
                    "dcp-chunk-without-place",
                    "the metadata does not locate a chunk",
                    tensor=key,
                    file=str(self._path),
                    found=f"no place for the chunk at {list(offsets)}" if size else "no place for the object",
                    remedy=_COPY_AGAIN,
                )
            )
            return None
        if place.transforms:
            self._problems.append(
                Problem(
                    "chunk-transformed",
                    "a chunk is stored transformed",
                    tensor=key,
                    file=str(self._path),
                    expected="chunks as torch.save writes them",
                    found=reprlib.repr(place.transforms),
                    remedy="save the checkpoint without stream transforms",
                )
            )
        return DcpChunk(offsets, size, self._file(place.path), *sizes((place.offset, place.length)))

    def _file(self, relative: str) -> str:
        if relative not in self._files:
            self._files[relative] = str(path_below(self._path.parent, relative))
        return self._files[relative]


def _is_path(value: Any) -> bool:
    """Whether a value is a path in a nested state dict, as torch writes it: keys and indices."""
    return isinstance(value, tuple) and all(isinstance(part, (str, int)) for part in value)


def _chunks(metadata: DcpMetadata) -> Iterator[tuple[str, DcpChunk]]:
    for key, tensor in metadata.tensors.items():
        for chunk in tensor.chunks:
            yield key, chunk
    yield from metadata.objects.items()


def _file_problems(folder: Path, metadata: DcpMetadata) -> Iterator[Problem]:
    """Problems of files that are missing, or too short for their chunks."""
    needed: dict[str, tuple[int, str]] = {}
    for key, chunk in _chunks(metadata):
        end = chunk.offset + chunk.length
        if end > needed.get(chunk.file, (-1, ""))[0]:
            needed[chunk.file] = end, key
    for file, (end, key) in sorted(needed.items()):
        try:
            size = as_path(file).stat().st_size
        except OSError as error:
            yield Problem(
                "dcp-file-missing",
                "a file of the checkpoint is missing",
                file=file,
                rule="every file named in .metadata exists",
                found=error.strerror,
                remedy=f"copy it from the node that wrote it into {folder}",
            )
            continue
        if size < end:
            yield Problem(
                "dcp-file-truncated",
                "a file of the checkpoint was cut short",
                tensor=key,
                file=file,
                expected=f"at least {end} bytes",
                found=f"{size} bytes",
                remedy="copy or download the file again",
            )


def write_metadata(metadata: DcpMetadata) -> bytes:
    """The content of `.metadata`, for torch 2.4 and later and for megatron-core's torch_dist.

    Values that torch fills with None or does not write by default are None or left out here: older versions lack the
    classes, and newer ones supply the values.
    """
    return _MetadataWriter().write(metadata)


class _MetadataWriter:
    """Writes the pickle from prebuilt pieces: a model of 671B parameters has 400,000 chunks."""

    def __init__(self) -> None:
        self._pickler = Pickler()
        self._prepared: dict[Any, bytes] = {}
        self._box = self._prepare(Global(METADATA_MODULE, "ChunkStorageMetadata")) + OPEN
        self._index = self._prepare(Global(METADATA_MODULE, "MetadataIndex")) + OPEN
        self._place = self._prepare(Global(STORAGE_MODULE, "_StorageInfo")) + OPEN
        self._raw = self._pickler.raw

    def write(self, metadata: DcpMetadata) -> bytes:
        """The complete pickle."""
        pickler = self._pickler
        pickler.write(Global(METADATA_MODULE, "Metadata"))
        self._raw(OPEN)
        pickler.write("state_dict_metadata")
        self._raw(b"}(")
        for key, tensor in metadata.tensors.items():
            self._write_tensor(key, tensor)
        for key in metadata.objects:
            pickler.write(key)
            pickler.write(Reduce(Global(METADATA_MODULE, "BytesStorageMetadata")))
        self._raw(b"u")
        pickler.write("planner_data")
        pickler.write(metadata.planner_data)
        pickler.write("storage_data")
        self._raw(b"}(")
        for key, tensor in metadata.tensors.items():
            index = self._index_of(key)
            for chunk in tensor.chunks:
                self._write_place(index, self._size(chunk.offsets), chunk)
        for key, chunk in metadata.objects.items():
            self._write_place(self._index_of(key), b"N", chunk)
        self._raw(b"u")
        pickler.write("storage_meta")
        pickler.write(None)
        self._raw(CLOSE)
        return pickler.finish()

    def _prepare(self, value: Any) -> bytes:
        if value not in self._prepared:
            self._prepared[value] = self._pickler.prepare(value)
        return self._prepared[value]

    def _size(self, sizes: tuple[int, ...]) -> bytes:
        if sizes not in self._prepared:
            self._prepared[sizes] = self._pickler.prepare(Reduce(Global("torch", "Size"), (sizes,)))
        return self._prepared[sizes]

    def _write_tensor(self, key: str, tensor: DcpTensor) -> None:
        pickler, prepare, size = self._pickler, self._prepare, self._size
        layout = Reduce(Global("torch.serialization", "_get_layout"), ("torch.strided",))
        contiguous = Reduce(Global(METADATA_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
        pickler.write(key)
        pickler.write(Global(METADATA_MODULE, "TensorStorageMetadata"))
        self._raw(OPEN)
        pickler.write("properties")
        state = (tensor.dtype, layout, False, contiguous, False)
        pickler.write(Reduce(Global(METADATA_MODULE, "TensorProperties"), (), state, new=True))
        pickler.write("size")
        self._raw(size(tensor.shape))
        pickler.write("chunks")
        self._raw(b"](")
        offsets, sizes = prepare("offsets"), prepare("sizes")
        for chunk in tensor.chunks:
            low, extent = size(chunk.offsets), size(chunk.sizes)
            self._raw(b"".join((self._box, offsets, low, sizes, extent, CLOSE)))
        self._raw(b"e" + CLOSE)

    def _index_of(self, key: str) -> bytes:
        """The index of a chunk of `key`, up to its offsets."""
        prepare = self._prepare
        fields = prepare("fqn") + prepare(key) + prepare("index") + b"N" + prepare("offset")
        return self._index + fields

    def _write_place(self, index: bytes, offsets: bytes, chunk: DcpChunk) -> None:
        begin, length = encode_int(chunk.offset), encode_int(chunk.length)
        path, at, extent = map(self._prepare, ("relative_path", "offset", "length"))
        file = (path, self._prepare(chunk.file), at, begin, extent, length)
        self._raw(b"".join((index, offsets, CLOSE, self._place, *file, CLOSE)))
