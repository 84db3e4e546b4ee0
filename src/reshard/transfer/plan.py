"""The plan: the source of every byte of the output, known before any tensor is read.

A plan is a list of output files. A file consists of literal bytes (headers, pickles, configs) and of blocks:
boxes of planned tensors, contiguous in the file. The view behind a block is compiled when the block is written, so the
plan of a model with half a million shards fits in memory.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from reshard.algebra.dtypes import BY_NAME, DType
from reshard.algebra.storage import Storage
from reshard.algebra.tensors import Cells, Replica, Tensor
from reshard.algebra.views import View
from reshard.base.errors import Problem, raise_all
from reshard.base.quantities import size
from reshard.transfer.memory_budget import MemoryNeed
from reshard.transfer.source_files import Sources

ZERO = Storage("", 0, 0)
"""The source of elements that no input has: vocabulary padding."""


class Planned(NamedTuple):
    """A complete tensor of the output. `source` compiles its view over `Cells` (or `ZERO` cells)."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    source: Callable[[], View]

    @staticmethod
    def of(name: str, tensor: Tensor, dtype: DType | None = None) -> Planned:
        """A tensor of a checkpoint under another name, and in another dtype."""
        return Planned(name, dtype or tensor.dtype, tensor.shape, lambda: tensor.view)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class OutputCommand(NamedTuple):
    """A command for an output, whose arguments are texts, and paths that are relative to the destination."""

    purpose: str
    arguments: tuple[str | PurePath, ...]

    def typed(self, target: Path, single: str | None = None) -> str:
        """The command for the output at `target`, which is the file `single` of the plan or a folder with all."""

        def place(word: str | PurePath) -> str:
            if isinstance(word, str):
                return word
            if single is None:
                return str(target / word)
            return str(target.with_name(word.name.replace(PurePath(single).stem, target.stem, 1)))

        return shlex.join(map(place, self.arguments))


class Block(NamedTuple):
    """A view of planned elements, contiguous at byte `offset` of a file.

    `crc_at` lists the offsets at which the file stores the CRC32 of the block (little-endian, four bytes).
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    source: Callable[[], View]
    offset: int
    crc_at: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @staticmethod
    def whole(tensor: Planned, offset: int, crc_at: tuple[int, ...] = ()) -> Block:
        """A complete tensor as one block."""
        return Block(tensor.name, tensor.dtype, tensor.shape, tensor.source, offset, crc_at)


@dataclass
class OutputFile:
    """A file to write, relative to the destination. `literals` yields (offset, bytes).

    `blocks` can be iterated over more than once, and may create its blocks each time.
    """

    path: str
    size: int
    blocks: Iterable[Block] = ()
    literals: Callable[[], Iterator[tuple[int, bytes]]] = field(default=lambda: iter(()))

    @staticmethod
    def of_bytes(path: str, content: bytes) -> OutputFile:
        """A small file with this content."""
        return OutputFile(path, len(content), literals=lambda: iter([(0, content)]))

    @staticmethod
    def copy_of(path: str, source: Path) -> OutputFile:
        """A copy of `source`, which is read when the copy is written."""
        size = source.stat().st_size
        cells = Cells(Storage(str(source), 0, size), BY_NAME["uint8"])
        return OutputFile(path, size, [Block(path, cells.dtype, (size,), lambda: View.of(cells, size), 0)])


@dataclass(repr=False)
class Plan:
    """Everything that a conversion will do.

    Attributes
    ----------
    source, target : str
        Formats of the source and the output.
    files : list of OutputFile
        All files of the output.
    tensors, parameters : int
        Number of tensors, and of their elements.
    dropped : mapping of str to int
        Bytes of the source that each rule drops.
    replicas : list of Replica
        Tensors that are stored more than once; they are compared before anything is written.
    notes : list of str
        What users should know.
    warnings : list of Problem
        Problems that do not prevent the conversion.
    facts : dict
        Content of `reshard.json`.
    load_with : list of str
        Flags with which Megatron-LM loads the output.
    afterwards : list of Command
        Commands that users may run next.
    need : Need
        Least memory that computing the tensors takes.
    sources : Sources
        All files that were read for the plan, and those of the tensors.
    outputs : sequence of Planned
        All tensors of the output.
    left_out : frozenset of str
        Those of the rules in `dropped` that drop complete tensors, because the output has no place for them.
    suffix : str
        The suffix of a destination that is the only file of the plan; "" if there must be a folder.
    """

    source: str
    target: str
    files: list[OutputFile]
    tensors: int
    parameters: int
    dropped: Mapping[str, int]
    replicas: list[Replica]
    notes: list[str]
    warnings: list[Problem] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    load_with: list[str] = field(default_factory=list)
    afterwards: list[OutputCommand] = field(default_factory=list)
    need: MemoryNeed = field(default_factory=MemoryNeed)
    sources: Sources = field(default_factory=Sources)
    outputs: Sequence[Planned] = ()
    left_out: frozenset[str] = frozenset()
    suffix: str = ""

    def __repr__(self) -> str:
        tensors = "1 tensor" if self.tensors == 1 else f"{self.tensors:,} tensors"
        return f"<Plan {self.source} → {self.target}: {tensors} in {len(self.files):,} files, {size(self.nbytes)}>"

    @cached_property
    def nbytes(self) -> int:
        """Size of the output, in bytes."""
        return sum(file.size for file in self.files)

    def audit(self, tensors: Iterable[Planned]) -> None:
        """Check that blocks fit into their files without overlap, and that together they contain every tensor.

        The rules are a bijection (`families.binding`), the names are complete (`logical`), and the chunks of the source
        tile it (its reader). With this check, every element is therefore converted exactly once. Raises ReshardError
        listing every offender, which would be a mistake in a format.
        """
        problems = []
        written: Counter[str] = Counter()
        for file in self.files:
            end = 0
            for block in sorted(file.blocks, key=lambda block: block.offset):
                if block.offset < end or block.offset + block.nbytes > file.size:
                    position = f"bytes {block.offset} to {block.offset + block.nbytes}"
                    problems.append(
                        _mistake(block.name, file.path, f"from byte {end} in {file.size}", position)
                    )
                end = block.offset + block.nbytes
                written[block.name] += block.nbytes
        for tensor in tensors:
            # Rank files repeat what ranks share; chunks of a shared checkpoint never do.
            copies, rest = divmod(written[tensor.name], tensor.nbytes) if tensor.nbytes else (1, 0)
            if rest or not copies:
                position = f"{written[tensor.name]} bytes"
                problems.append(_mistake(tensor.name, None, f"all of {tensor.nbytes} bytes", position))
        raise_all(problems)


def _mistake(tensor: str, file: str | None, expected: str, found: str) -> Problem:
    return Problem(
        "plan-inconsistent",
        "the plan is inconsistent",
        tensor=tensor,
        file=file,
        rule="every byte of the output is written exactly once",
        expected=expected,
        found=found,
        remedy="this is a bug in reshard: please report it with this message",
    )
