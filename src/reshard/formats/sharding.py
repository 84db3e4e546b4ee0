"""How tensor parallelism cuts a tensor into the shards of ranks, and how these become the whole again."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from reshard.algebra.views import View, concat


class Split(NamedTuple):
    """Tensor parallelism cuts `axis`, inside each of `parts` equal parts (gate and up are two)."""

    axis: int
    parts: int = 1


class Box(NamedTuple):
    """A part of a tensor: where it begins on each axis, and how far it reaches."""

    low: tuple[int, ...]
    size: tuple[int, ...]


@lru_cache(maxsize=4096)
def shard_boxes(shape: tuple[int, ...], split: Split | None, rank: int, ranks: int) -> tuple[Box, ...]:
    """The boxes of a tensor of `shape` that make up the shard of one of `ranks`; one for each part."""
    if split is None:
        return (Box((0,) * len(shape), shape),)
    axis, part = split.axis, shape[split.axis] // split.parts
    step = part // ranks
    return tuple(
        Box(
            tuple(index * part + rank * step if i == axis else 0 for i in range(len(shape))),
            (*shape[:axis], step, *shape[axis + 1 :]),
        )
        for index in range(split.parts)
    )


def shard(view: View, split: Split, rank: int, ranks: int) -> View:
    """The shard of one rank, as that rank holds it."""
    return concat([view.box(*box) for box in shard_boxes(view.shape, split, rank, ranks)], split.axis)


def join(shards: list[View], split: Split) -> View:
    """The whole tensor from the shards of all ranks: the inverse of `shard`."""
    parts = [view.split(split.axis, split.parts, view.shape[split.axis] // split.parts) for view in shards]
    return concat(parts, split.axis + 1).merge(split.axis)
