"""The shards of each Megatron-Core rank: the keys of its state dict, and the shard of each.

Both a legacy file and the model of a running rank have exactly these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.formats.megatron.mcore import (
    LayerSpelling,
    MegatronPosition,
    StageFinder,
    is_carried,
    is_gated,
    name_of,
    place_of,
    split_of,
)
from reshard.formats.sharding import Shard, Split, shard_of
from reshard.transfer.plan import Planned


class MegatronRank(NamedTuple):
    """The coordinates of a rank in a folder name."""

    tp: int
    pp: int = 0
    ep: int = 0


class _RankTensor(NamedTuple):
    """A tensor that ranks of one virtual chunk store (or parts of it): its key in their state dicts, and its split."""

    key: str
    expert: int | None
    tensor: Planned
    split: Split | None


class RankStates:
    """Computes the shards of each rank, and their keys under its layer spec.

    `tensors` have reshard's own names, `args` are Megatron-LM's. `split` returns how tensor parallelism cuts a tensor,
    from its name and whether the MLP is gated; `below` is the prefix of a language model's names; each chunk has at
    least `least` layers.
    """

    def __init__(
        self,
        tensors: Sequence[Planned],
        args: Mapping[str, Any],
        layout: Layout,
        transformer_engine: bool,
        split: Callable[[str, bool], Split | None] = split_of,
        below: str = "",
        least: int = 1,
    ) -> None:
        self.layout = layout
        self._te = transformer_engine
        self._tied = not args.get("untie_embeddings_and_output_weights", False)
        self._experts = int(args.get("num_experts") or 0)
        self._mtp = int(args.get("mtp_num_layers") or 0)
        names = [tensor.name for tensor in tensors]
        if any(".in_proj.weight" in name for name in names):
            raise ReshardError(
                "delta-net-layout-unsupported",
                "a gated delta net cannot be written to rank files",
                rule="reshard writes rank files for every megatron-core layer except gated delta nets",
                expected="a torch_dist checkpoint",
                remedy="choose --to megatron",
            )
        self._spelling = LayerSpelling(
            map(place_of, names), transformer_engine=transformer_engine, torch_dist=False
        )
        self.stages = StageFinder(layout, int(args["num_layers"]), least)
        self._table = self.stages.table()
        gated = is_gated(args)
        self.below = below
        self._held: dict[tuple[int, int], list[_RankTensor]] = {}
        for tensor in tensors:
            place = place_of(tensor.name)
            for at, renamed in self._holders(place):
                key = self._key(renamed, place[1:3])
                rank_tensor = _RankTensor(key, place.expert, tensor, split(tensor.name, gated))
                self._held.setdefault(at, []).append(rank_tensor)

    def _holders(self, place: MegatronPosition) -> Iterator[tuple[tuple[int, int], MegatronPosition]]:
        """The (stage, chunk)s that store a tensor, and its place there."""
        last = self.stages.last
        if place.stack == "decoder" and place.layer is not None:
            stage, chunk, index = self._table[place.layer]
            yield (stage, chunk), place._replace(layer=index)
        elif is_carried(name_of(place)):
            yield (0, 0), place
        elif place.module.startswith("embedding."):
            yield (0, 0), place
            if last != (0, 0) and self._mtp:
                yield last, place
            if self._tied and self.layout.pp > 1:
                yield last, MegatronPosition("output_layer.weight")
        else:
            yield last, place

    def state(self, rank: MegatronRank, chunk: int, etp: int) -> dict[str, Shard]:
        """The shards of one virtual chunk of a rank, by the keys of its state dict, without extra states.

        `etp` is the index of the rank among those that share each expert's tensors.
        """
        local = self._experts // self.layout.ep
        state: dict[str, Shard] = {}
        for key, expert, tensor, split in self._held.get((rank.pp, chunk), []):
            if expert is None:
                state[key] = shard_of(tensor, split, rank.tp, self.layout.tp)
            elif expert // local == rank.ep:
                state[key] = shard_of(tensor, split, etp, self.layout.etp)
        return state

    def _key(self, place: MegatronPosition, layer: tuple[str, int | None]) -> str:
        module = place.module
        if place.layer is not None:
            module = self._spelling.module(module, layer)
        if place.expert is not None:
            expert = place.expert % (self._experts // self.layout.ep)
            if self._te:
                module = f"{module}{expert}"
            else:
                module = module.replace("mlp.experts.", f"mlp.experts.local_experts.{expert}.", 1)
        name = module if place.layer is None else f"{place.stack}.layers.{place.layer}.{module}"
        return name if is_carried(name) else self.below + name
