"""A Megatron trainer as a checkpoint whose storages are the memory of its ranks.

The shards of each rank are those of its state dict, which the reader of rank files joins: it sees no difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from reshard.algebra.dtypes import dtype as dtype_of
from reshard.algebra.layout import Layout, SavedLayout
from reshard.algebra.storage import Storage, StoredTensor
from reshard.algebra.views import View, row_major
from reshard.base.errors import ReshardError
from reshard.exchange.trainer import Trainer, holders_of
from reshard.families import declared
from reshard.families.dialect import MEGATRON
from reshard.families.dims import Dims
from reshard.families.sized_family import Model
from reshard.folders.json_objects import read_object
from reshard.formats.checkpoint import Checkpoint, ModelDescription
from reshard.formats.detection import LEGACY
from reshard.formats.megatron.legacy import LegacyReader
from reshard.formats.megatron.rank_files import JoiningFacts, stage_ranks
from reshard.formats.megatron.rank_states import MegatronRank, RankStates
from reshard.formats.options import ConversionOptions
from reshard.planning import planned_tensors
from reshard.transfer.plan import Planned
from reshard.transfer.source_files import Sources

VOCABULARY_UNIT = 128
"""Megatron-LM pads the vocabulary to a multiple of this for each tensor-parallel rank."""

RankContents = Mapping[MegatronRank, Mapping[str, Mapping[str, StoredTensor]]]
"""For each rank of the model, the state dicts of its chunks, with the place of each tensor in its memory."""


def described_trainer(
    model: Path, layout: Layout, *, dtype: str = "bfloat16", transformer_engine: bool = True
) -> Trainer:
    """The trainer that Megatron-Core would be for a Hugging Face folder (of which the config is read) and a layout.

    Raises ReshardError if Megatron-Core does not compute the model, or cannot have the layout.
    """
    sized = sized_model(model)
    layout = layout.over(sized.dims.layers)
    unit = VOCABULARY_UNIT * layout.tp
    padded = sized.padded(-(-sized.dims.vocab // unit) * unit)
    native = [
        Planned(name, dtype_of(dtype), bound.shape, partial(View.of, name, *bound.shape))
        for name, bound in padded.binding().native.items()
    ]
    states = RankStates(native, sized.args, layout, transformer_engine)
    contents = {rank: _in_memory(states, rank, layout, etp) for rank, etp in _model_ranks(layout).items()}
    facts = JoiningFacts.of_args({**sized.args, **_layout_args(layout)})
    ranks = {storage_name(rank): _global_ranks(rank, layout) for rank in contents}
    return trainer_of(contents, facts, layout, model, sized.args, ranks)


def trainer_of(
    contents: RankContents,
    facts: JoiningFacts,
    layout: Layout,
    model: Path,
    args: Mapping[str, Any],
    ranks: Mapping[str, Sequence[int]],
) -> Trainer:
    """A trainer whose ranks have these state dicts; `model` is the folder of the config.

    `ranks` has the global ranks with the same state dicts by the path of their storages.
    """
    pairs = stage_ranks(layout)
    reader = LegacyReader(facts, {pair: rank % layout.etp for pair, rank in pairs.items()})
    reader.read(contents)
    if misfits := reader.misfits():
        raise ReshardError(misfits)
    checkpoint = Checkpoint(
        path=model,
        format=LEGACY,
        dialect=MEGATRON,
        tensors=reader.tensors(),
        description=ModelDescription(model, args=args),
        layout=SavedLayout.of(layout),
    )
    hub = planned_tensors(checkpoint, ConversionOptions(base=model))
    keys = {
        stored.storage: (chunk, key)
        for content in contents.values()
        for chunk, tensors in content.items()
        for key, stored in tensors.items()
    }
    holders = holders_of(reader.tensors().values(), reader.collected.replicas, ranks)
    return Trainer.of(hub.by_name, holders, sum(map(len, ranks.values())), keys)


def sized_model(model: Path) -> Model:
    """The model that a folder's config describes. Raises ReshardError if its family is not declared."""
    config = read_object(model / "config.json", Sources())
    family = declared(str(config.get("model_type")))
    if family is None:
        raise ReshardError(
            "trainer-family-unknown",
            "the family of the model is not declared",
            file=str(model / "config.json"),
            found=str(config.get("model_type")),
            remedy="choose a model of a declared family: docs/families.md lists them",
        )
    text = family.config.text(config)
    args = family.config.to_args(text)
    return Model(family, config, args, Dims.from_args(args, text["vocab_size"]))


def _model_ranks(layout: Layout) -> dict[MegatronRank, int]:
    """The coordinates of each rank of the model, and which part of an expert it holds."""
    return {
        MegatronRank(tp, pp, ep): rank % layout.etp
        for (tp, ep), rank in stage_ranks(layout).items()
        for pp in range(layout.pp)
    }


def _in_memory(
    states: RankStates, rank: MegatronRank, layout: Layout, etp: int
) -> dict[str, dict[str, StoredTensor]]:
    """The tensors of a rank one after another in a storage that has the rank's name."""
    contents: dict[str, dict[str, StoredTensor]] = {}
    at = 0
    for chunk in range(layout.vpp):
        stored = contents[f"model{chunk}" if layout.vpp > 1 else "model"] = {}
        for key, shard in states.state(rank, chunk, etp).items():
            storage = Storage(storage_name(rank), at, shard.numel * shard.dtype.itemsize)
            stored[key] = StoredTensor(storage, shard.dtype, shard.shape, row_major(shard.shape))
            at += storage.nbytes
    return contents


def storage_name(rank: MegatronRank) -> str:
    """The path of the storages of a rank."""
    return f"tp{rank.tp}-pp{rank.pp}-ep{rank.ep}"


def _layout_args(layout: Layout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "virtual_pipeline_model_parallel_size": layout.virtual,
    }


def _global_ranks(rank: MegatronRank, layout: Layout) -> list[int]:
    """The global ranks with the same part of the model, in Megatron-Core's order tp-cp-ep-dp-pp."""
    in_stage = stage_ranks(layout)[rank.tp, rank.ep]
    stages = range(rank.pp * layout.dp, (rank.pp + 1) * layout.dp)
    return [stage * layout.stage_ranks + in_stage for stage in stages]
