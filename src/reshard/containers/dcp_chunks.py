"""A planned `.distcp` file: one small torch.save file per chunk, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from reshard.algebra.dtypes import DType
from reshard.containers.dcp_metadata import DcpChunk
from reshard.containers.torchfiles.write import Image, NewTensor, layout_torch_file
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

    def _laid_out(self) -> Iterator[tuple[Planned, tuple[int, ...], tuple[int, ...], int, Image]]:
        """Each chunk: its tensor, its box in it (low, size), the offset of its image in the file, and the image."""
        for tensor, chunk in zip(self._tensors, self._places, strict=True):
            lead = len(chunk.offsets) - len(tensor.shape)
            low, size = chunk.offsets[lead:], chunk.sizes[lead:]
            yield tensor, low, size, chunk.offset, _image(tensor.dtype, lead, size)


@lru_cache(maxsize=4096)
def _image(dtype: DType, lead: int, size: tuple[int, ...]) -> Image:
    """The torch.save file of a chunk of `size`, in a tensor that is stacked along `lead` axes."""
    return layout_torch_file(NewTensor("data", dtype, (1,) * lead + size))


def _boxed(tensor: Planned, low: tuple[int, ...], size: tuple[int, ...]) -> Callable[[], Any]:
    if size == tensor.shape:
        return tensor.source
    return lambda: tensor.source().box(low, size)
