"""Plan a folder of torch.distributed.checkpoint that the live model of transformers loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from reshard.formats import dcp_folder, fused
from reshard.formats.dcp_folder import Alias
from reshard.layout import Layout
from reshard.logical import logical_tensors
from reshard.plan import Plan
from reshard.planning.common import Source, companion_files, finished, hub_tensors
from reshard.planning.megatron import lost_padding

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def plan(source: Source) -> Plan:
    """Logical tensors under the names that they have in memory, with config and tokenizer beside."""
    logical = logical_tensors(source.checkpoint, source.model)
    model_type = source.model.family.name if source.model else source.config.get("model_type")
    tensors = fused.live_tensors(hub_tensors(logical, source.options.dtype), model_type)
    aliases = _tied_head(source, {tensor.name for tensor in tensors})
    files = dcp_folder.lay_out(tensors, aliases, source.options.max_shard_size)
    files += companion_files(source, tensors)
    dropped = Counter(source.checkpoint.dropped)
    if source.model:
        dropped += lost_padding(source.checkpoint, source.model, source.model.dims.vocab)
    result = finished(source, dcp_folder.NAME, files, tensors, dropped, logical, Layout())
    result.notes.append('load it with dcp.load({"model": model.state_dict()}, checkpoint_id=FOLDER)')
    return result


def _tied_head(source: Source, names: set[str]) -> Iterator[Alias]:
    """The head of a live model whose head is its embedding: the hub does not store it."""
    tied = source.model.dims.tied if source.model else source.config.get("tie_word_embeddings")
    if tied and HEAD not in names and EMBEDDING in names:
        yield Alias(HEAD, EMBEDDING)
