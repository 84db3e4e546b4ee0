"""The weights of a model as Megatron-Core shards them over ranks; nothing here needs torch.

The plan is that of a conversion to Megatron: the family's declaration inverted, then sharded by the layout. A rank
reads only the bytes of its own shards, and no converted copy is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from reshard.algebra.layout import Layout
from reshard.families.binding import DroppedElements
from reshard.families.sized_family import Model
from reshard.formats.megatron.mcore import place_of, split_of
from reshard.formats.megatron.rank_states import MegatronRank, RankStates
from reshard.formats.sharding import Shard, Split
from reshard.model.logical_tensors import LogicalTensors
from reshard.planning.target_tensors import OutputTypes, native_tensors
from reshard.transfer.plan import Planned


class Coordinates(NamedTuple):
    """Coordinates of a rank in the groups that shard weights. Ranks with equal coordinates have equal weights."""

    tp: int
    pp: int
    ep: int
    etp: int

    def key(self, chunk: int, name: str) -> str:
        """A unique name of a shard among all ranks: experts are sharded over other ranks than the rest."""
        where = f"ep{self.ep} etp{self.etp}" if ".experts." in name else f"tp{self.tp}"
        return f"{where} pp{self.pp} chunk{chunk} {name}"


@dataclass(frozen=True)
class ShardedWeights:
    """The shards of a model on each rank. `rows` are those of its embedding, padding included."""

    model: Model
    layout: Layout
    rows: int
    states: RankStates
    nowhere: frozenset[str] = frozenset()
    """Tensors of Megatron-Core that the Hub's model lacks: they stay zero."""

    def of(self, at: Coordinates, chunk: int) -> dict[str, Shard]:
        """The shards of one virtual stage of a rank, by the names in its live model."""
        return self.states.state(MegatronRank(at.tp, at.pp, at.ep), chunk, at.etp)

    def everywhere(self) -> Iterator[Coordinates]:
        """The coordinates of all ranks with different weights."""
        layout = self.layout
        for index in range(layout.stage_ranks):
            for pp in range(layout.pp):
                yield Coordinates(index % layout.tp, pp, index // layout.etp % layout.ep, index % layout.etp)

    @property
    def parameters(self) -> int:
        """The parameters of the complete model, each counted once, without padding of the vocabulary."""
        binding = self.model.padded(self.model.dims.vocab).binding()
        return sum(int(np.prod(bound.shape)) for bound in binding.native.values())


def sharded(
    model: Model,
    logical: LogicalTensors,
    layout: Layout,
    rows: int,
    *,
    transformer_engine: bool,
    dtype: str | None,
) -> ShardedWeights:
    """The shards of a model's tensors. `rows` are those of its embedding, padding included."""
    model = model.padded(rows)
    natives = model.binding().native
    tensors = list(native_tensors(logical, natives, OutputTypes(dtype)))
    nowhere = frozenset(
        name
        for name, bound in natives.items()
        if all(isinstance(piece.source, DroppedElements) for piece in bound.view.pieces)
    )
    return ShardedWeights(model, layout, rows, states_of(tensors, model, layout, transformer_engine), nowhere)


def states_of(tensors: list[Planned], model: Model, layout: Layout, transformer_engine: bool) -> RankStates:
    split = split_of if transformer_engine else _split_by_local_spec
    return RankStates(tensors, model.args, layout, transformer_engine, split)


def _split_by_local_spec(name: str, gated: bool) -> Split | None:
    """The local spec shards the down projections of latent attention, TransformerEngine's replicates them."""
    down = name.endswith(("linear_q_down_proj.weight", "linear_kv_down_proj.weight"))
    return Split(0) if down else split_of(name, gated)


def layer_of(weights: ShardedWeights, at: Coordinates, chunk: int, name: str) -> str:
    """The name of a live module, with the number of its layer in the complete model."""
    place = place_of(name)
    if place.stack != "decoder" or place.layer is None:
        return name
    table = weights.states.stages.table()
    layer = next(layer for layer, where in table.items() if where == (at.pp, chunk, place.layer))
    return f"decoder.layers.{layer}.{place.module}"
