"""A `.distcp` file while it is planned: small files of `torch.save`, one for each chunk, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from reshard.dtypes import DType
from reshard.formats.dcp.metadata import DcpChunk
from reshard.formats.torchfiles.write import Image, NewTensor, layout_torch_file
from reshard.plan import Block, OutputFile, Planned


@dataclass
class ChunkFile:
    """One file, to which a layout assigns chunks of tensors. `path` is relative to the folder of `.metadata`."""

    path: str
    size: int = 0
    blocks: list[Block] = field(default_factory=list)
    images: list[tuple[int, Image]] = field(default_factory=list)

    def add(
        self, tensor: Planned, low: tuple[int, ...], size: tuple[int, ...], at: tuple[int, ...] = ()
    ) -> DcpChunk:
        """Put the box of `tensor` from `low` of `size` at the end, and return where.

        A tensor that is one of several which are stacked stands at `at` on the leading axes.
        """
        stacked = (*(1 for _ in at), *size)
        image = _image(tensor.dtype, stacked)
        (slot,) = image.slots
        begin = self.size
        offset, crc_at = begin + slot.offset, tuple(begin + crc for crc in slot.crc_at)
        source = _boxed(tensor, low, size)
        self.blocks.append(Block(tensor.name, tensor.dtype, size, source, offset, crc_at))
        self.images.append((begin, image))
        self.size += image.size
        return DcpChunk((*at, *low), stacked, self.path, begin, image.size)

    def append(self, content: bytes) -> DcpChunk:
        """Put a whole file of torch.save at the end, whose content is known, and return where."""
        chunk = DcpChunk((), (), self.path, self.size, len(content))
        self.images.append((self.size, Image(len(content), ((0, content),), ())))
        self.size += len(content)
        return chunk

    def finished(self, folder: str = "") -> OutputFile:
        """The file, below `folder` of the output."""

        def literals() -> Iterator[tuple[int, bytes]]:
            for begin, image in self.images:
                for offset, content in image.literals:
                    yield begin + offset, content

        return OutputFile(f"{folder}/{self.path}" if folder else self.path, self.size, self.blocks, literals)


@lru_cache(maxsize=4096)
def _image(dtype: DType, shape: tuple[int, ...]) -> Image:
    return layout_torch_file(NewTensor("data", dtype, shape))


def _boxed(tensor: Planned, low: tuple[int, ...], size: tuple[int, ...]) -> Callable[[], Any]:
    if size == tensor.shape:
        return tensor.source
    return lambda: tensor.source().box(low, size)
