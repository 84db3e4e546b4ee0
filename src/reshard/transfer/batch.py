"""Batches: the parts of an output file that are assembled and written as units."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from isal.isal_zlib import crc32

from reshard.transfer.elements import RAW_DTYPES, Overflows, count_nonfinite, has_nonfinite
from reshard.transfer.gather import Gatherer
from reshard.transfer.memory_budget import WINDOW_BYTES
from reshard.transfer.plan import Block, OutputFile
from reshard.transfer.sink import PAGE_BYTES
from reshard.transfer.written_file import BegunBlock


class BlockState:
    """One block while it is written, and what its bytes have shown so far, including earlier runs if it was `begun`."""

    def __init__(self, block: Block, begun: BegunBlock | None = None) -> None:
        self.block = block
        self.view = block.source()
        self.end = block.offset + block.nbytes
        self.nonfinite = begun is not None and begun.nonfinite
        self.overflow = begun.overflow if begun else None
        self._checksum = begun.checksum if begun else 0

    def begun(self, begin: int, end: int) -> BegunBlock:
        """Progress of the block once bytes `begin` to `end` of its file are written."""
        return BegunBlock(begin, end, self._checksum, self.nonfinite, self.overflow)

    def is_transposed(self) -> bool:
        """Whether elements adjacent in the output are not adjacent in the source."""
        return any(piece.axes and piece.axes[-1][1] != 1 for piece in self.view.pieces)

    def fill(self, out: np.ndarray[Any, Any], begin: int, gatherer: Gatherer) -> None:
        """Gather the bytes of the block from `begin` into `out`. Called once for each range, in order."""
        size = self.block.dtype.itemsize
        first, last = begin // size, (begin + out.nbytes) // size
        pieces = self.view.pieces if last - first == self.view.numel else self.view.window(first, last)
        gatherer.fill(pieces, self.block.dtype, out.view(RAW_DTYPES[size]))
        self._note_nonfinite(out, gatherer.take_lost())
        if self.block.crc_at:
            self._checksum = crc32(out.data, self._checksum)

    def _note_nonfinite(self, out: np.ndarray[Any, Any], lost: Overflows) -> None:
        """Note whether `out` contains NaN or Inf, and how many of them are finite values that were `lost`."""
        if (lost.overflow is None and self.nonfinite) or not has_nonfinite(out, self.block.dtype):
            return
        self.nonfinite = True
        if overflow := lost.of(count_nonfinite(out, self.block.dtype) if lost.overflow else 0):
            self.overflow = overflow.joined(self.overflow)

    def sign(self, raw: np.ndarray[Any, Any], begin: int) -> Iterator[tuple[int, bytes]]:
        """Write the checksum to its places in `raw`, which begins at `begin`; yield the places outside of it."""
        checksum = self._checksum.to_bytes(4, "little")
        for place in self.block.crc_at:
            at = place - begin
            if at >= 0 and at + 4 <= len(raw):
                raw[at : at + 4] = np.frombuffer(checksum, np.uint8)
            else:
                yield place, checksum


@dataclass
class Batch:
    """Bytes `begin` to `end` of a file: some adjacent blocks, and the bytes around them."""

    number: int
    begin: int
    end: int
    blocks: list[Block] = field(default_factory=list)
    literals: list[tuple[int, bytes]] = field(default_factory=list)

    def windows(self, limit: int, begin: int) -> Iterator[tuple[int, int]]:
        """Cut the bytes after `begin` into ranges of at most `limit` bytes, at page and element boundaries."""
        while begin < self.end:
            end = self.element_at(min(self.end, begin + limit - begin % PAGE_BYTES))
            yield begin, end
            begin = end

    def element_at(self, place: int) -> int:
        """Where the element begins that has byte `place` of the file; the same place if there is no element."""
        for block in self.blocks:
            if block.offset < place < block.offset + block.nbytes:
                return place - (place - block.offset) % block.dtype.itemsize
        return place

    def fill(
        self, raw: np.ndarray[Any, Any], begin: int, streams: list[BlockState], gatherer: Gatherer
    ) -> None:
        """Assemble the window `raw`, which begins at byte `begin` of the file; bytes without content become zero."""
        end, position = begin + len(raw), begin
        parts: list[tuple[int, int, BlockState | bytes]]
        parts = [(offset, offset + len(content), content) for offset, content in self.literals]
        parts += [(stream.block.offset, stream.end, stream) for stream in streams]
        for first, last, part in sorted(parts, key=lambda part: part[0]):
            low, high = max(first, begin), min(last, end)
            if low >= high:
                continue
            raw[position - begin : low - begin] = 0
            out = raw[low - begin : high - begin]
            if isinstance(part, BlockState):
                part.fill(out, low - first, gatherer)
            else:
                out[:] = np.frombuffer(part, np.uint8, high - low, low - first)
            position = high
        raw[position - begin :] = 0


def batches(file: OutputFile) -> Iterator[Batch]:
    """Split a file at block ends: small blocks share a batch of one window, a large block has its own."""
    literals = sorted(file.literals(), key=lambda literal: literal[0])
    batch = Batch(0, 0, 0)
    for block in sorted(file.blocks, key=lambda block: block.offset):
        end = block.offset + block.nbytes
        if batch.blocks and end - batch.begin > WINDOW_BYTES:
            yield _with_literals(batch, literals)
            batch = Batch(batch.number + 1, batch.end, batch.end)
        batch.blocks.append(block)
        batch.end = end
    batch.end = file.size
    yield _with_literals(batch, literals)


def _with_literals(batch: Batch, literals: list[tuple[int, bytes]]) -> Batch:
    """Move the literals (in order) that begin before the end of a batch to it."""
    count = next((i for i, (offset, _) in enumerate(literals) if offset >= batch.end), len(literals))
    batch.literals, literals[:count] = literals[:count], []
    return batch
