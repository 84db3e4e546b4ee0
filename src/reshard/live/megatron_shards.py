"""The shards of one rank of Megatron-Core, and the reading of them into its live tensors.

The plan is that of a conversion to Megatron: the family's declaration inverted, then sharded by the layout. A rank
reads only the bytes of its own shards, and no converted copy is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np

from reshard.algebra.dtypes import dtype
from reshard.algebra.layout import Layout
from reshard.base.errors import Problem
from reshard.families.sized_family import Model
from reshard.formats.megatron.mcore import refuse_undeclared, split_of
from reshard.formats.megatron.rank_states import MegatronRank, RankStates
from reshard.formats.sharding import Shard, Split
from reshard.live.torch_modules import is_direct, raw_elements
from reshard.model.logical_tensors import LogicalTensors
from reshard.planning.target_tensors import OutputTypes, native_tensors
from reshard.transfer.elements import RAW_DTYPES
from reshard.transfer.gather import Gatherer
from reshard.transfer.ledger import Ledger
from reshard.transfer.thread_files import OpenFiles


def rank_states(
    model: Model, logical: LogicalTensors, layout: Layout, *, transformer_engine: bool
) -> RankStates:
    """The shards of all ranks, by the names of their live tensors. The vocabulary of `model` is padded."""
    tensors = list(native_tensors(logical, model.binding().native, OutputTypes(None)))
    refuse_undeclared(tensor.name for tensor in tensors)
    split = split_of if transformer_engine else _split_by_local_spec
    return RankStates(tensors, model.args, layout, transformer_engine, split)


def _split_by_local_spec(name: str, gated: bool) -> Split | None:
    """The local spec shards the down projections of latent attention, TransformerEngine's replicates them."""
    down = name.endswith(("linear_q_down_proj.weight", "linear_kv_down_proj.weight"))
    return Split(0) if down else split_of(name, gated)


def shards_of_this_rank(states: RankStates, chunks: int) -> list[dict[str, Shard]]:
    """The shards of each chunk. Megatron makes expert groups even without experts; the layout then has size 1."""
    from megatron.core import parallel_state as ps

    rank, etp = this_rank(), ps.get_expert_tensor_parallel_rank() % states.layout.etp
    return [states.state(rank, chunk, etp) for chunk in range(chunks)]


def this_rank() -> MegatronRank:
    """The coordinates of this rank in Megatron-Core's process groups."""
    from megatron.core import parallel_state as ps

    return MegatronRank(
        ps.get_tensor_model_parallel_rank(),
        ps.get_pipeline_model_parallel_rank(),
        ps.get_expert_model_parallel_rank(),
    )


def live_tensors(chunk: Any) -> dict[str, Any]:
    """The parameters and buffers that a checkpoint of the model would contain, adapters included."""
    import torch

    return {
        name: value
        for name, value in chunk.state_dict(keep_vars=True).items()
        if torch.is_tensor(value) and not name.endswith("_extra_state")
    }


def differences(live: Mapping[str, Any], shards: Mapping[str, Shard]) -> Iterator[Problem]:
    """A problem for each tensor that only one side has, or that has another shape."""
    for name in sorted(live.keys() | shards.keys()):
        built = list(live[name].shape) if name in live else None
        planned = list(shards[name].shape) if name in shards else None
        if built != planned:
            yield Problem(
                "megatron-model-not-as-planned",
                "megatron-core's model differs from the planned one",
                tensor=name,
                expected=str(planned),
                found=str(built),
                remedy="build it from the arguments of these weights",
            )


def fill(pairs: Iterable[tuple[Any, Shard]], ledger: Ledger | None) -> None:
    """Read each shard into its live tensor. `ledger` receives the checksums of what is read."""
    with closing(OpenFiles()) as files:
        gatherer = Gatherer(files, ledger)
        for tensor, shard in pairs:
            _read(shard, tensor, gatherer)
            gatherer.take_passed()  # the ledger has these ranges, and no journal needs them
            # megatron-core marks what it initializes. Without the mark, a weight counts once in the gradient norm.
            whole = shard.shape == shard.tensor.shape
            tensor.tensor_model_parallel = not whole or ".experts." in shard.tensor.name


def _read(shard: Shard, tensor: Any, gatherer: Gatherer) -> None:
    """Read a shard into the memory of the live tensor, in its dtype."""
    import torch

    kind = dtype(str(tensor.dtype).removeprefix("torch."))
    target = tensor.detach()
    direct = is_direct(target)
    raw = raw_elements(target) if direct else np.empty(shard.numel, RAW_DTYPES[kind.itemsize])
    gatherer.fill(shard.source().pieces, kind, raw)
    if not direct:
        target.copy_(torch.from_numpy(raw.view(np.uint8)).view(target.dtype).view(target.shape))
