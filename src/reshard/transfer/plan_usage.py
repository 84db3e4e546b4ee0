"""What a plan uses of its sources, and whether it writes each element of its outputs once, computed from its views."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, TypeVar

from reshard.algebra.dtypes import DType
from reshard.algebra.multisets import Multiset, total
from reshard.algebra.storage import Storage
from reshard.algebra.tensors import Cells, Computed, Tensor
from reshard.algebra.views import Piece, View
from reshard.transfer.plan import Block, OutputFile, Plan

COMPUTING = "computed values"
"""Stands for the names of all tensors that are computed from what they read, which may be read more than once."""

OnCount = Callable[[int, int], None]
"""Callback that receives the number of views done, and their total number."""


T = TypeVar("T")


class UsageFault(NamedTuple):
    """A tensor whose sums do not balance."""

    tensor: str
    message: str


@dataclass
class TensorUses:
    """What one tensor, or a block of it, is made of.

    `stored` are bytes of storages, `computed` items of computed sources by their numbers, `zeros` the number of items
    without a source.
    """

    stored: dict[Storage, Multiset] = field(default_factory=dict)
    computed: dict[int, Multiset] = field(default_factory=dict)
    zeros: int = 0

    def add(self, other: TensorUses) -> None:
        """Add the uses of another block."""
        _add(self.stored, other.stored)
        _add(self.computed, other.computed)
        self.zeros += other.zeros

    def times(self, factor: int) -> TensorUses:
        """The same uses, `factor` times."""
        return TensorUses(
            {storage: used.times(factor) for storage, used in self.stored.items()},
            {key: used.times(factor) for key, used in self.computed.items()},
            self.zeros * factor,
        )


def _add(uses: dict[T, Multiset], more: Mapping[T, Multiset]) -> None:
    for source, used in more.items():
        uses[source] = uses.get(source, Multiset()).plus(used)


def stored_pieces(view: View) -> Iterator[tuple[Cells, Piece]]:
    """The pieces of a view that come from storages."""
    for piece in view.pieces:
        if isinstance(piece.source, Cells) and piece.source.storage.path:
            yield piece.source, piece


def bytes_of(cells: Cells, piece: Piece) -> Multiset:
    """The bytes of its storage that a piece uses."""
    return Multiset.of(piece.start, ((n, step) for n, step, _ in piece.axes), cells.dtype.itemsize)


def storages_of(view: View) -> dict[Storage, Multiset]:
    """The bytes of each storage that a view uses."""
    storages: dict[Storage, Multiset] = {}
    for cells, piece in stored_pieces(view):
        _add(storages, {cells.storage: bytes_of(cells, piece)})
    return storages


def key_of(source: Computed) -> Hashable:
    """The identity of a computed source: its type and dtype, and everything that it reads."""
    return type(source).__name__, source.dtype, tuple(map(_key_of_tensor, source.inputs))


def _key_of_tensor(tensor: Tensor) -> Hashable:
    pieces = (
        (key_of(p.source) if isinstance(p.source, Computed) else p.source, p.start, p.axes)
        for p in tensor.view.pieces
    )
    return tensor.dtype, tensor.shape, tuple(pieces)


@dataclass
class PlanContent:
    """What the files of a plan consist of.

    `elements` are those of the tensors, of which `computed` are computed and `zeros` are zeros without a source;
    `copies` are further elements, of tensors that several ranks store. The bytes of all files are those of tensors
    (with copies), headers and configs, files copied unchanged, and zeros between them.
    """

    tensors: int = 0
    elements: int = 0
    computed: int = 0
    zeros: int = 0
    copies: int = 0
    blocks: int = 0
    files: int = 0
    bytes: int = 0
    bytes_of_tensors: int = 0
    bytes_of_headers: int = 0
    bytes_copied: int = 0
    bytes_between: int = 0


class PlanUsage:
    """Everything that a plan uses, by storage and by the name of the tensor that uses it. `faults` do not balance."""

    def __init__(self, plan: Plan, on_count: OnCount = lambda done, count: None) -> None:
        self.stored: dict[Storage, dict[str, Multiset]] = defaultdict(dict)
        self.written = PlanContent()
        self.faults: list[UsageFault] = []
        self._numbers: dict[Computed, int] = {}
        self._keys: dict[Hashable, int] = {}
        self._computed: dict[int, dict[str, Multiset]] = defaultdict(dict)
        self._ends: dict[int, int] = defaultdict(int)
        self._inputs: dict[Cells, set[tuple[int, tuple[tuple[int, int], ...]]]] = defaultdict(set)
        self._collect(plan, on_count)

    def _collect(self, plan: Plan, on_count: OnCount) -> None:
        names = {tensor.name for tensor in plan.outputs}
        count = len(names) + sum(1 for file in plan.files for _ in file.blocks)
        blocks: dict[str, TensorUses] = defaultdict(TensorUses)
        items: dict[str, int] = defaultdict(int)
        done = 0
        for file in plan.files:
            for block in self._blocks_of(file):
                if block.name not in names:
                    self.written.bytes_copied += block.nbytes
                    self._tiled(block.name, file.path, block.source(), block.shape)
                    continue
                view = block.source()
                self._tiled(block.name, file.path, view, block.shape)
                blocks[block.name].add(self._uses(view))
                items[block.name] += prod(block.shape)
                self.written.bytes_of_tensors += block.nbytes
                self.written.blocks += 1
                done += 1
                on_count(done, count)
        for tensor in plan.outputs:
            uses = self._uses(tensor.source())
            self._compare(tensor.name, prod(tensor.shape), tensor.dtype, uses, blocks[tensor.name], items)
            for storage, used in uses.stored.items():
                self.stored[storage][tensor.name] = used
            for key, used in uses.computed.items():
                self._computed[key][tensor.name] = used
            done += 1
            on_count(done, count)
        self._settle()

    def _blocks_of(self, file: OutputFile) -> Iterator[Block]:
        """The blocks of a file, none of which may overlap another; counts the other bytes too."""
        end, block_bytes = 0, 0
        for block in sorted(file.blocks, key=lambda block: block.offset):
            if block.offset < end or block.offset + block.nbytes > file.size:
                self.faults.append(UsageFault(block.name, f"reaches beyond its place in {file.path}"))
            end = block.offset + block.nbytes
            block_bytes += block.nbytes
            yield block
        literal = sum(len(content) for _, content in file.literals())
        if block_bytes + literal > file.size:
            self.faults.append(
                UsageFault(file.path, f"{block_bytes + literal:,} bytes are written to {file.size:,}")
            )
        self.written.files += 1
        self.written.bytes += file.size
        self.written.bytes_of_headers += literal
        self.written.bytes_between += file.size - block_bytes - literal

    def _tiled(self, name: str, path: str, view: View, shape: tuple[int, ...]) -> None:
        """Check that each element of a block has exactly one source."""
        targets = total(Multiset.of(p.at, ((n, target) for n, _, target in p.axes)) for p in view.pieces)
        whole = prod(shape)
        if targets != Multiset.of(0, ((whole, 1),) if whole else ((0, 1),)):
            what = (
                f"{targets.numel:,} of {whole:,} elements"
                if targets.numel != whole
                else "some elements twice"
            )
            self.faults.append(UsageFault(name, f"the plan writes {what} of a block in {path}"))

    def _uses(self, view: View) -> TensorUses:
        uses = TensorUses(storages_of(view))
        for piece in view.pieces:
            if isinstance(piece.source, Computed):
                source = piece.source
                key = self._number(source)
                used = Multiset.of(piece.start, ((n, step) for n, step, _ in piece.axes))
                uses.computed[key] = uses.computed.get(key, Multiset()).plus(used)
                self._ends[key] = max(self._ends[key], piece.source_end)
            elif isinstance(piece.source, Cells) and not piece.source.storage.path:
                uses.zeros += piece.numel
        return uses

    def _number(self, source: Computed) -> int:
        """The number of a computed source, the same for equal sources; records what a new one reads."""
        if source not in self._numbers:
            self._numbers[source] = self._keys.setdefault(key_of(source), len(self._keys))
            for tensor in source.inputs:
                for cells, piece in stored_pieces(tensor.view):
                    self._inputs[cells].add((piece.start, tuple((n, step) for n, step, _ in piece.axes)))
                for piece in tensor.view.pieces:
                    if isinstance(piece.source, Computed):
                        self._number(piece.source)
        return self._numbers[source]

    def _compare(
        self, name: str, numel: int, dtype: DType, uses: TensorUses, blocks: TensorUses, items: dict[str, int]
    ) -> None:
        """Check that the blocks of a tensor are all of it, once or as often as there are ranks that store it."""
        copies, rest = divmod(items[name], numel) if numel else (1, 0)
        elements = dtype.elements(numel)
        self.written.tensors += 1
        self.written.elements += elements
        self.written.copies += elements * (copies - 1)
        self.written.zeros += dtype.elements(uses.zeros)
        self.written.computed += dtype.elements(total(uses.computed.values()).numel)
        if rest or not copies or blocks != uses.times(copies):
            written = (
                f"{items[name]:,} of {numel:,} elements" if rest or not copies else "other elements of it"
            )
            self.faults.append(UsageFault(name, f"its blocks write {written}"))

    def _settle(self) -> None:
        """Check that all elements of each computed source are used once; their inputs count as used."""
        for key, users in self._computed.items():
            if total(set(users.values())) != Multiset.of(0, ((self._ends[key], 1),)):
                names = ", ".join(sorted(users))
                self.faults.append(UsageFault(names, "not every computed element is used once"))
        for cells, parts in self._inputs.items():
            used = total(Multiset.of(start, axes, cells.dtype.itemsize) for start, axes in parts)
            before = self.stored[cells.storage].get(COMPUTING, Multiset())
            self.stored[cells.storage][COMPUTING] = before.plus(used)

    def inputs(self, storage: Storage) -> Iterator[tuple[Cells, Piece]]:
        """The pieces of a storage from which elements are computed."""
        for cells, parts in self._inputs.items():
            if cells.storage == storage:
                for start, axes in parts:
                    yield cells, Piece(cells, start, 0, tuple((n, step, 0) for n, step in axes))

    def used(self, storage: Storage) -> Multiset:
        """The bytes of a storage that are used, each counted once even if several tensors are made from it."""
        return total(set(self.stored.get(storage, {}).values()))

    def shared(self, storage: Storage) -> int:
        """The number of bytes of a storage that more than one tensor uses."""
        users = list(self.stored.get(storage, {}).values())
        return sum(each.numel for each in set(users) if users.count(each) > 1)
