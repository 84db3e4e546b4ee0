"""Plan a folder of torch.distributed.checkpoint that the live model of transformers loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from reshard.families import live_names
from reshard.formats import dcp, fused
from reshard.formats.dcp import Alias
from reshard.formats.dcp.optimizer import NewOptimizer
from reshard.model.logical import logical_tensors
from reshard.planning.common import Source, Types, companion_files, finished, hub_tensors
from reshard.planning.megatron import lost_padding
from reshard.planning.optimizer import (
    DROPPED,
    FLOAT32,
    MASTERS,
    MOMENTS,
    frozen_notes,
    live_states,
    still_dropped,
    with_masters,
)
from reshard.transfer.plan import Plan

LOADS_STATES = (
    'and its "optimizer" into get_optimizer_state_dict(model, optimizer, '
    "options=StateDictOptions(flatten_optimizer_state_dict=True))"
)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def plan(source: Source) -> Plan:
    """Logical tensors under the names that they have in memory, with config and tokenizer beside."""
    checkpoint, options = source.checkpoint, source.options
    if options.with_optimizer:
        checkpoint = with_masters(checkpoint, options.dtype)
    logical = logical_tensors(replace(source.resolved, checkpoint=checkpoint))
    live = live_names(source.model.family.name if source.model else source.config.get("model_type"))
    tensors = fused.live_tensors(hub_tensors(logical, options.dtype), live)
    aliases = _tied_head(source, {tensor.name for tensor in tensors})
    states = live_states(logical, live) if options.with_optimizer else {}
    optimizer = NewOptimizer(states, checkpoint.optimizer) if states and checkpoint.optimizer else None
    files = dcp.lay_out(tensors, aliases, options.max_shard_size, optimizer)
    files += companion_files(source, tensors)
    dropped = still_dropped(checkpoint, MOMENTS) if states else Counter(checkpoint.dropped)
    if source.model:
        vocab = source.model.dims.vocab
        dropped += lost_padding(checkpoint, source.model, vocab, with_states=options.with_optimizer)
    result = finished(source, dcp.NAME, files, tensors, dropped, logical, states=states)
    result.notes.append('load it with dcp.load({"model": model.state_dict()}, checkpoint_id=FOLDER)')
    if states:
        result.notes += [LOADS_STATES, *frozen_notes(source)]
    if states and MASTERS in checkpoint.states and Types(options.dtype).wanted != FLOAT32:
        result.notes.append(f"the fp32 masters are {DROPPED} too; --dtype float32 makes them the weights")
    return result


def _tied_head(source: Source, names: set[str]) -> Iterator[Alias]:
    """The head of a live model whose head is its embedding: the hub does not store it."""
    tied = source.model.dims.tied if source.model else source.config.get("tie_word_embeddings")
    if tied and HEAD not in names and EMBEDDING in names:
        yield Alias(HEAD, EMBEDDING)
