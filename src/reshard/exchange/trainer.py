"""A trainer as a checkpoint whose storages are the memory of its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from reshard.algebra.storage import Storage
from reshard.algebra.tensors import Cells, Replica, Tensor, cells_of
from reshard.algebra.views import View
from reshard.formats.stepped_tensor import SteppedTensor
from reshard.transfer.plan import Planned

Holders = tuple[tuple[int, Storage], ...]
"""All that hold the same bytes: their global ranks, and the storage of each."""


@dataclass(frozen=True)
class Trainer:
    """The tensors of a model under the Hub's names, each element at a place in the memory of a rank.

    `holders` has, for each storage that `tensors` name, all that hold the same bytes, with their global ranks. `keys`
    tells which tensor a storage is: its chunk ("model", or "model0" …) and its key in the state dict of that. `added`
    are numbers that are added to the elements of a storage: Megatron stores some norms less one.
    """

    tensors: Mapping[str, Planned]
    holders: Mapping[Storage, Holders]
    ranks: int
    keys: Mapping[Storage, tuple[str, str]]
    added: Mapping[Storage, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Planned],
        holders: Mapping[Storage, Holders],
        ranks: int,
        keys: Mapping[Storage, tuple[str, str]],
    ) -> Trainer:
        """The trainer with these tensors, from which steps that only add a number are taken out."""
        moved, added = dict(tensors), dict[Storage, float]()
        for name, planned in tensors.items():
            source = planned.source().pieces[0].source
            if isinstance(source, SteppedTensor) and source.step.plus:
                moved[name] = Planned.of(name, source.inputs[0], planned.dtype)
                added.update(dict.fromkeys(storages_of(moved[name].source()), source.step.plus))
        return cls(moved, holders, ranks, keys, added)

    @cached_property
    def order(self) -> Mapping[Storage, int]:
        """The number of each storage among those that the same ranks hold."""
        order, counted = dict[Storage, int](), Counter[tuple[int, ...]]()
        for storage, holders in self.holders.items():
            ranks = tuple(rank for rank, _ in holders)
            order[storage] = counted[ranks]
            counted[ranks] += 1
        return order

    def views(self, rank: int | None = None) -> dict[str, View]:
        """The tensors over storages; with `rank`, only those of which it holds elements, and only these elements."""
        views = {name: planned.source() for name, planned in self.tensors.items()}
        if rank is None:
            return views
        elsewhere = {
            first for first, holders in self.holders.items() if rank not in (holder for holder, _ in holders)
        }
        own = {name: _without(view, elsewhere) for name, view in views.items()}
        return {name: view for name, view in own.items() if view.pieces}


def _without(view: View, storages: Collection[Storage]) -> View:
    """A view without the elements in some storages."""
    kept = (
        piece
        for piece in view.pieces
        if not isinstance(piece.source, Cells) or piece.source.storage not in storages
    )
    return View(view.shape, tuple(kept))


def holders_of(
    tensors: Iterable[Tensor], replicas: Iterable[Replica], ranks: Mapping[str, Iterable[int]]
) -> dict[Storage, Holders]:
    """Who holds each storage of some tensors: the `ranks` that have its path, and those that have its replicas'."""
    same = {storage: {storage: None} for tensor in tensors for storage in storages_of(tensor.view)}
    for replica in replicas:
        for first, other in zip(
            storages_of(replica.first.view), storages_of(replica.second.view), strict=True
        ):
            same[first][other] = None
    return {
        first: tuple((rank, each) for each in copies for rank in ranks[each.path])
        for first, copies in same.items()
    }


def storages_of(view: View) -> list[Storage]:
    """The storages of the elements of a view."""
    return [cells.storage for cells in cells_of(view)]
