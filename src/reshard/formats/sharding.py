"""How tensor parallelism cuts a tensor into the shards of ranks, and how to join them.

A rank's file in torch's format contains `Shard`s; reading and writing use the same rules for all engines.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from reshard.algebra.dtypes import DType
from reshard.algebra.storage import StoredTensor
from reshard.algebra.tensors import Replica, Tensor, cells_of
from reshard.algebra.views import View, concat
from reshard.base.errors import Problem
from reshard.containers.torchfiles.write import TensorSlot
from reshard.formats.copied_files import CopyFinder
from reshard.transfer.plan import Block, Planned


class Split(NamedTuple):
    """A cut by tensor parallelism along `axis`, inside each of `parts` equal parts (gate and up are two)."""

    axis: int
    parts: int = 1


class Region(NamedTuple):
    """A part of a tensor: its offset and its size on each axis."""

    low: tuple[int, ...]
    size: tuple[int, ...]


@lru_cache(maxsize=4096)
def shard_boxes(shape: tuple[int, ...], split: Split | None, rank: int, ranks: int) -> tuple[Region, ...]:
    """The boxes of a tensor of `shape` that make up the shard of one of `ranks`; one for each part."""
    if split is None:
        return (Region((0,) * len(shape), shape),)
    axis, part = split.axis, shape[split.axis] // split.parts
    step = part // ranks
    return tuple(
        Region(
            tuple(index * part + rank * step if i == axis else 0 for i in range(len(shape))),
            (*shape[:axis], step, *shape[axis + 1 :]),
        )
        for index in range(split.parts)
    )


def shard(view: View, split: Split, rank: int, ranks: int) -> View:
    """The shard of one rank, as that rank stores it."""
    return concat([view.box(*box) for box in shard_boxes(view.shape, split, rank, ranks)], split.axis)


def join(shards: list[View], split: Split) -> View:
    """The complete tensor from the shards of all ranks: the inverse of `shard`."""
    parts = [view.split(split.axis, split.parts, view.shape[split.axis] // split.parts) for view in shards]
    return concat(parts, split.axis + 1).merge(split.axis)


@dataclass
class TensorShards:
    """The shards of one tensor by the index of their ranks, how it was cut, and over how many ranks."""

    split: Split | None
    ranks: int
    by_rank: dict[int, Tensor] = field(default_factory=dict)

    def missing_ranks(self) -> list[int]:
        """The indexes of the ranks that have no shard."""
        return sorted(set(range(self.ranks)) - self.by_rank.keys())

    def joined(self) -> Tensor:
        """The complete tensor. Requires that no shard is missing, and that they fit together."""
        shards = [self.by_rank[index] for index in sorted(self.by_rank)]
        if len(shards) == 1 or self.split is None:
            return shards[0]
        views = [shard.view for shard in shards]
        whole = concat(views, self.split.axis) if self.split.parts == 1 else join(views, self.split)
        return Tensor(shards[0].dtype, whole)


class CollectedShards:
    """The shards of all ranks by the name of their tensor. `replicas` are those that several ranks have."""

    def __init__(self) -> None:
        self.copies = CopyFinder()
        self.replicas: list[Replica] = []
        self._tensors: dict[str, TensorShards] = {}

    def __getitem__(self, name: str) -> TensorShards:
        return self._tensors[name]

    def add(self, name: str, key: str, part: Tensor, split: Split | None, index: int, ranks: int) -> None:
        """Add the part of one of `ranks`, which its file has as `key`; the complete tensor if it is not cut."""
        shards = self._tensors.setdefault(name, TensorShards(split, ranks))
        self.replicas += add_shard(shards.by_rank, index if shards.split else 0, part, name)
        if shards.split:
            self.compare(key, part, (name, index))

    def compare(self, key: str, part: Tensor, place: tuple[Hashable, ...]) -> None:
        """Note what a file has at a place, so that copies of it are found."""
        for cells in cells_of(part.view):
            stored = StoredTensor(cells.storage, cells.dtype, part.shape, ())
            self.copies.add(cells.storage.path, key, place, stored)

    def misfits(self, problems_of: Callable[[str, TensorShards, Split], Iterable[Problem]]) -> list[Problem]:
        """The problems of all tensors that are cut."""
        cut = ((name, shards, shards.split) for name, shards in self._tensors.items() if shards.split)
        return [problem for each in cut for problem in problems_of(*each)]

    def joined(self) -> dict[str, Tensor]:
        """All tensors, complete. Requires that no shard is missing, and that they fit together."""
        return {name: shards.joined() for name, shards in self._tensors.items()}


def add_shard(
    shards: dict[Any, Tensor],
    place: Any,
    shard: Tensor,
    tensor: str,
    rule: str = "replicated tensors are equal on all ranks",
) -> list[Replica]:
    """Put a rank's shard in its place. If another rank's is there, they are replicas, and must be equal."""
    first = shards.setdefault(place, shard)
    return [] if first is shard else [Replica(tensor, first, shard, rule)]


class Shard(NamedTuple):
    """One rank's shard of a tensor. `source` compiles its view."""

    tensor: Planned
    shape: tuple[int, ...]
    source: Callable[[], View]

    @property
    def dtype(self) -> DType:
        return self.tensor.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def __hash__(self) -> int:
        return id(self.source)


def shard_of(tensor: Planned, split: Split | None, index: int, ranks: int) -> Shard:
    """The shard of one of `ranks`: the complete tensor if it is not cut."""
    if not split or ranks == 1:
        return Shard(tensor, tensor.shape, tensor.source)
    shape = list(tensor.shape)
    shape[split.axis] //= ranks
    return Shard(tensor, tuple(shape), lambda: shard(tensor.source(), split, index, ranks))


def blocks_of(shards: Iterable[tuple[Shard, TensorSlot]]) -> Iterator[Block]:
    """The blocks of a torch.save file, from shards and their slots."""
    for shard, slot in shards:
        yield Block(shard.tensor.name, shard.dtype, slot.shape, shard.source, slot.offset, slot.crc_at)


class SharedSize(NamedTuple):
    """A size that parallel ranks share, which numbers of ranks can share it, and how to describe them."""

    what: str
    fits: Callable[[int], bool]
    expected: str


def divided(what: str, size: int) -> SharedSize:
    """A size that is divided equally among the ranks."""
    return SharedSize(what, lambda ranks: size % ranks == 0, f"a divisor of {size}")


def misfits(flag: str, ranks: int, shares: Sequence[SharedSize]) -> Iterator[Problem]:
    """A problem for each size that this number of ranks cannot share."""
    choices = [n for n in range(1, 65) if all(share.fits(n) for share in shares)]
    for what, fits, expected in shares:
        if not fits(ranks):
            yield Problem(
                "size-not-divisible",
                f"{what} {'are' if what[-1] == 's' else 'is'} not divisible by {flag} {ranks}",
                rule="every rank has an equal share",
                expected=expected,
                found=f"{flag} {ranks}",
                remedy=f"choose {flag} from {', '.join(map(str, choices))}",
            )
