"""Weights of a checkpoint into the model chunks of a Megatron-Core rank, which reads only its own shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reshard.algebra.layout import Layout
from reshard.base.errors import Problem, ReshardError
from reshard.commands.weights import Weights
from reshard.families.family import ENGINE_TITLES, MCORE, Family
from reshard.formats.megatron.rank_states import RankStates
from reshard.live.megatron_shards import differences, fill, live_tensors, rank_states, shards_of_this_rank
from reshard.live.torch_modules import LoadedTensors, telling_what_changed
from reshard.model.logical_tensors import logical_tensors
from reshard.transfer.compare import unequal_replicas
from reshard.transfer.gather import check_sums
from reshard.transfer.ledger import Ledger
from reshard.transfer.memory_budget import shared

if TYPE_CHECKING:
    import torch

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def is_chunk(module: Any) -> bool:
    """Whether a module is Megatron-Core's, a class derived from one, or a wrapper: DDP, Float16Module."""
    return any(kind.__module__.startswith("megatron.core.") for kind in type(module).__mro__)


def load_chunks(chunks: Sequence[torch.nn.Module], weights: Weights, *, verify: bool) -> LoadedTensors:
    """Fill the chunks of this rank, one for each virtual pipeline stage. Raises ReshardError.

    The layout is that of the process groups that Megatron-Core has initialized. `verify` compares tensors that are
    stored more than once, and the CRC32s that the files record.
    """
    require_groups()
    inner = [inner_model(chunk) for chunk in chunks]
    resolved = weights.plan.source
    model, logical = resolved.declared, logical_tensors(resolved)
    require_core(model.family, str(weights.checkpoint.path))
    live = [live_tensors(chunk) for chunk in inner]
    uses_te = any(name.endswith(".layer_norm_weight") for tensors in live for name in tensors)
    layout = layout_of_groups(len(chunks), has_experts=model.dims.experts > 0).over(model.dims.layers)
    padded = model.padded(_rows(live, layout) or model.dims.padded_vocab)
    states = rank_states(padded, logical, layout, transformer_engine=uses_te)
    shards = shards_of_this_rank(states, len(chunks))
    if problems := [*_other_layers(inner, states)]:
        raise ReshardError(problems)
    if problems := [problem for pair in zip(live, shards, strict=True) for problem in differences(*pair)]:
        raise ReshardError(problems)
    pairs = [
        (tensors[name], shard)
        for tensors, chunk_shards in zip(live, shards, strict=True)
        for name, shard in chunk_shards.items()
    ]
    ledger = Ledger(every=True) if verify else None
    with weights.reading(), weights.checkpoint.sources.unchanged(ledger.passed if ledger else None):
        if verify and (problems := unequal_replicas(weights.plan.replicas, shared(2, 1 << 28))):
            raise ReshardError(problems)
        with telling_what_changed(len(pairs), [len(pairs)], str(weights.checkpoint.path)):
            fill(pairs, ledger)
            if ledger:
                check_sums(ledger, {})
    nbytes = sum(shard.numel * shard.dtype.itemsize for _, shard in pairs)
    return LoadedTensors(len(pairs), nbytes, nbytes)


def require_groups() -> None:
    """Raise ReshardError if Megatron-Core does not know which part of the model this rank has."""
    from megatron.core import parallel_state as ps

    if not ps.is_initialized():
        raise ReshardError(
            "live-megatron-without-groups",
            "Megatron-Core's process groups are not initialized",
            rule="they say which part of the model this rank has",
            remedy="call megatron.core.parallel_state.initialize_model_parallel first",
        )


def require_core(family: Family, file: str) -> None:
    """Raise ReshardError if it is not Megatron-Core itself that computes a family."""
    if family.computed_by != MCORE:
        raise ReshardError(
            "live-megatron-lacks-family",
            f"megatron-core's GPTModel does not compute the family {family.name}",
            file=file,
            rule=f"the engine of this family is {ENGINE_TITLES[family.computed_by]}",
            remedy="convert a checkpoint of that engine instead: reshard convert",
        )


def layout_of_groups(chunks: int, *, has_experts: bool) -> Layout:
    """The layout of Megatron-Core's process groups; it makes expert groups even without experts."""
    from megatron.core import parallel_state as ps

    return Layout(
        ps.get_tensor_model_parallel_world_size(),
        ps.get_pipeline_model_parallel_world_size(),
        chunks,
        ps.get_expert_model_parallel_world_size() if has_experts else 1,
        ps.get_expert_tensor_parallel_world_size() if has_experts else 1,
    )


def inner_model(module: Any) -> Any:
    """The model inside of Megatron's wrappers, each of which has it as `module`."""
    while is_chunk(module) and hasattr(module, "module"):
        module = module.module
    return module


def _other_layers(chunks: Sequence[Any], states: RankStates) -> Iterator[Problem]:
    """A problem for each chunk whose layers are not those of its place: all chunks have the same names."""
    from megatron.core import parallel_state as ps

    stage = ps.get_pipeline_model_parallel_rank()
    for index, chunk in enumerate(chunks):
        layers = getattr(getattr(chunk, "decoder", None), "layers", None) or ()
        built = [getattr(layer, "layer_number", None) for layer in layers]
        here = {
            local: layer + 1
            for layer, (pp, at_chunk, local) in states.stages.table().items()
            if (pp, at_chunk) == (stage, index)
        }
        planned = [here[local] for local in sorted(here)]
        if None not in built and built != planned:
            yield Problem(
                "live-chunk-has-other-layers",
                "a chunk has other layers than its place in the pipeline",
                tensor=f"chunk {index}",
                expected=f"layers {planned}",
                found=f"layers {built}",
                remedy="pass all chunks of this rank, in the order of Megatron-Core",
            )


def _rows(live: Sequence[Mapping[str, Any]], layout: Layout) -> int | None:
    """Rows of the embedding or the head, padding included; None on a rank that has neither."""
    tables = (tensors.get(name) for tensors in live for name in (EMBEDDING, HEAD))
    return next((table.shape[0] * layout.tp for table in tables if table is not None), None)
