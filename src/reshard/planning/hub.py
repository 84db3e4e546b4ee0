"""Plan a Hugging Face folder."""

from __future__ import annotations

from collections import Counter

from reshard.formats import huggingface
from reshard.formats.quantization import UNTOLD, settings_of
from reshard.model.logical import logical_tensors
from reshard.model.quantizer import Quantized, quantized
from reshard.planning.common import Source, companion_files, elements, finished, hub_tensors
from reshard.planning.megatron import lost_padding
from reshard.transfer.plan import Plan


def plan(source: Source) -> Plan:
    """Logical tensors under their own names, in shards, with everything that loads them."""
    logical = logical_tensors(source.resolved)
    tensors = hub_tensors(logical, source.options.dtype)
    made = Quantized(tensors, {}, [])
    if source.options.quantize:
        made = quantized(tensors, source.options.quantize, source.config)
    files = huggingface.lay_out(made.tensors, source.options.max_shard_size)
    files += companion_files(source, tensors, made.settings)
    dropped = Counter(source.checkpoint.dropped)
    if source.model:
        dropped += lost_padding(source.checkpoint, source.model, source.model.dims.vocab)
    result = finished(source, huggingface.NAME, files, made.tensors, dropped, logical)
    result.notes += made.notes
    if made.settings:
        result.parameters = elements(tensors)
    quantization = source.checkpoint.quantization
    if quantization and not (quantization.settings or settings_of(source.config)):
        result.notes.append(UNTOLD)
    return result
