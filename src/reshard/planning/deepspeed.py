"""Plan a universal checkpoint of DeepSpeed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from reshard.errors import ReshardError, listed
from reshard.families import live_names
from reshard.formats import deepspeed, fused
from reshard.model.logical import logical_tensors
from reshard.planning.common import KEEPS_ITS_DTYPE, Source, Types, companion_files, finished, hub_tensors
from reshard.planning.megatron import lost_padding
from reshard.planning.optimizer import FLOAT32, MOMENTS, live_states, still_dropped, with_masters
from reshard.transfer.plan import Plan


def plan(source: Source) -> Plan:
    """Logical tensors in float32 under the names that they have in the engine's module, with config and tokenizer."""
    checkpoint, model, options = source.checkpoint, source.model, source.options
    if Types(options.dtype).wanted not in (None, FLOAT32):
        raise ReshardError(
            "a universal checkpoint holds fp32 masters",
            rule="DeepSpeed makes the weights of training of them, in the dtype that its config names",
            found=f"--dtype {options.dtype}",
            remedy="leave out --dtype",
        )
    checkpoint = with_masters(checkpoint, "float32")
    logical = logical_tensors(replace(source.resolved, checkpoint=checkpoint))
    live = live_names(model.family.name if model else source.config.get("model_type"))
    tensors = fused.live_tensors(hub_tensors(logical, "float32"), live)
    states = live_states(logical, live) if options.with_optimizer else {}
    step = checkpoint.iteration if isinstance(checkpoint.iteration, int) else 0
    files = deepspeed.lay_out(tensors, step, states, checkpoint.optimizer)
    files += companion_files(source, tensors)
    dropped = still_dropped(checkpoint, MOMENTS) if states else Counter(checkpoint.dropped)
    if model:
        dropped += lost_padding(checkpoint, model, model.dims.vocab, with_states=options.with_optimizer)
    result = finished(source, deepspeed.NAME, files, tensors, dropped, logical, states=states)
    result.notes.append('load it with {"checkpoint": {"load_universal": true}} in the config of DeepSpeed')
    buffers = [tensor.name for tensor in tensors if tensor.name.endswith(KEEPS_ITS_DTYPE)]
    if buffers:
        result.notes.append(
            f"DeepSpeed restores no buffers from a universal checkpoint: start the run from a model that has "
            f"{listed(buffers, 1)}"
        )
    return result
