"""Plan `.distcp` files, in which torch.save files of one chunk each follow each other, and a folder of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

from reshard.algebra.dtypes import DType
from reshard.containers.dcp_metadata import DcpChunk, DcpMetadata, DcpTensor, write_metadata
from reshard.containers.file_names import DCP_METADATA
from reshard.containers.torchfiles.write import FileImage, NewTensor, layout_torch_file
from reshard.transfer.plan import Block, OutputFile, Planned


@dataclass
class ChunkFile:
    """One file, to which a layout assigns chunks of tensors. `path` is relative to the folder of `.metadata`.

    Iteration yields its blocks. For each chunk it stores only the tensor and the place for `.metadata`, and makes the
    rest on demand: Kimi-K2 on 2048 ranks has 556,000 chunks.
    """

    path: str
    size: int = 0
    _tensors: list[Planned] = field(default_factory=list)
    _places: list[DcpChunk] = field(default_factory=list)
    _objects: list[tuple[int, bytes]] = field(default_factory=list)

    def add(
        self, tensor: Planned, low: tuple[int, ...], size: tuple[int, ...], at: tuple[int, ...] = ()
    ) -> DcpChunk:
        """Append the box of `tensor` at `low` with `size`, and return its place.

        If several tensors are stacked, `at` is the index of this one on the leading axes.
        """
        image = _image(tensor.dtype, len(at), size)
        chunk = DcpChunk(at + low, image.slots[0].shape, self.path, self.size, image.size)
        self._tensors.append(tensor)
        self._places.append(chunk)
        self.size += image.size
        return chunk

    def append(self, content: bytes) -> DcpChunk:
        """Append a complete torch.save file with known content, and return its place."""
        chunk = DcpChunk((), (), self.path, self.size, len(content))
        self._objects.append((self.size, content))
        self.size += len(content)
        return chunk

    def finished(self, folder: str = "") -> OutputFile:
        """The output file, in `folder` of the output."""
        path = f"{folder}/{self.path}" if folder else self.path
        return OutputFile(path, self.size, self, self._literals)

    def __iter__(self) -> Iterator[Block]:
        for tensor, low, size, begin, image in self._laid_out():
            (slot,) = image.slots
            crc_at = tuple(begin + place for place in slot.crc_at)
            yield Block(
                tensor.name, tensor.dtype, size, _boxed(tensor, low, size), begin + slot.offset, crc_at
            )

    def _literals(self) -> Iterator[tuple[int, bytes]]:
        for *_, begin, image in self._laid_out():
            for offset, content in image.literals:
                yield begin + offset, content
        yield from self._objects

    def _laid_out(self) -> Iterator[tuple[Planned, tuple[int, ...], tuple[int, ...], int, FileImage]]:
        """Each chunk: its tensor, its box in it (low, size), the offset of its image in the file, and the image."""
        for tensor, chunk in zip(self._tensors, self._places, strict=True):
            lead = len(chunk.offsets) - len(tensor.shape)
            low, size = chunk.offsets[lead:], chunk.sizes[lead:]
            yield tensor, low, size, chunk.offset, _image(tensor.dtype, lead, size)


@lru_cache(maxsize=4096)
def _image(dtype: DType, lead: int, size: tuple[int, ...]) -> FileImage:
    """The torch.save file of a chunk of `size`, in a tensor that is stacked along `lead` axes."""
    return layout_torch_file(NewTensor("data", dtype, (1,) * lead + size))


def _boxed(tensor: Planned, low: tuple[int, ...], size: tuple[int, ...]) -> Callable[[], Any]:
    if size == tensor.shape:
        return tensor.source
    return lambda: tensor.source().box(low, size)


MAX_CHUNK_BYTES = 64 << 20
"""Maximum size of a chunk in bytes: to load its part of a tensor, a rank reads complete chunks."""


class ChunkFolder:
    """The `.distcp` files of a state dict, of up to `max_file_size` each, and their `.metadata`.

    Chunks are complete rows, so that the files belong to no rank: any layout loads them.
    """

    def __init__(self, max_file_size: int) -> None:
        self.metadata = DcpMetadata({}, {}, {})
        self._files = [ChunkFile("__0_0.distcp")]
        self._max_file_size = max_file_size

    def add(self, tensor: Planned, rows: range | None = None) -> DcpTensor:
        """Add a tensor, or some of its rows, as chunks in one file or several."""
        shape = tensor.shape if rows is None else (len(rows), *tensor.shape[1:])
        entry = DcpTensor(tensor.dtype, shape, [])
        for low, size in _boxes(shape, tensor.dtype, min(MAX_CHUNK_BYTES, self._max_file_size)):
            nbytes = prod(size) * tensor.dtype.itemsize
            if self._files[-1].size and self._files[-1].size + nbytes > self._max_file_size:
                self._files.append(ChunkFile(f"__{len(self._files)}_0.distcp"))
            at = (low[0] + rows.start, *low[1:]) if rows else low
            entry.chunks.append(self._files[-1].add(tensor, at, size)._replace(offsets=low))
        return entry

    def append(self, content: bytes) -> DcpChunk:
        """Add an object: a complete torch.save file."""
        return self._files[-1].append(content)

    def name(self, path: tuple[str, ...], entry: DcpTensor | DcpChunk) -> None:
        """Name a tensor or an object by its path in the state dict. An entry can have several names."""
        assert self.metadata.planner_data is not None
        key = ".".join(path)
        self.metadata.planner_data[key] = path
        if isinstance(entry, DcpTensor):
            self.metadata.tensors[key] = entry
        else:
            self.metadata.objects[key] = entry

    def finished(self, folder: str = "") -> list[OutputFile]:
        """All files, in `folder` of the output, `.metadata` last."""
        path = f"{folder}/{DCP_METADATA}" if folder else DCP_METADATA
        metadata = OutputFile.of_bytes(path, write_metadata(self.metadata))
        return [*(file.finished(folder) for file in self._files), metadata]


def _boxes(
    shape: tuple[int, ...], dtype: DType, nbytes: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes (low, size) cut along the first axis, of at most `nbytes` each, or of one row if rows are longer."""
    if not shape:
        yield (), ()
        return
    rows, inner = shape[0], shape[1:]
    step = max(1, nbytes // max(1, prod(inner) * dtype.itemsize))
    rest = (0,) * len(inner)
    for begin in range(0, rows, step) or (0,):
        yield (begin, *rest), (min(step, rows - begin), *inner)
