"""Plan a universal checkpoint of DeepSpeed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from reshard.errors import ReshardError
from reshard.formats import deepspeed, deepspeed_universal, fused
from reshard.layout import Layout
from reshard.logical import LogicalTensors, logical_tensors
from reshard.plan import Plan, Planned
from reshard.planning.common import KEEPS_ITS_DTYPE, Source, Types, companion_files, finished, hub_tensors
from reshard.planning.megatron import lost_padding
from reshard.planning.optimizer import FLOAT32, hub_states, logical_states, still_dropped, with_masters

CARRIED = ("exp_avg", "exp_avg_sq")
"""The optimizer states that DeepSpeed knows."""


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
    logical = logical_tensors(checkpoint, model, source.config)
    model_type = model.family.name if model else source.config.get("model_type")
    tensors = fused.live_tensors(hub_tensors(logical, "float32"), model_type)
    states = _states(logical, model_type) if options.with_optimizer else {}
    step = checkpoint.iteration if isinstance(checkpoint.iteration, int) else 0
    files = deepspeed_universal.lay_out(tensors, step, states, checkpoint.optimizer)
    files += companion_files(source, tensors)
    dropped = still_dropped(checkpoint, CARRIED) if states else Counter(checkpoint.dropped)
    if model:
        dropped += lost_padding(checkpoint, model, model.dims.vocab, with_states=options.with_optimizer)
    result = finished(source, deepspeed.NAME, files, tensors, dropped, logical, Layout(), states)
    result.notes.append('load it with {"checkpoint": {"load_universal": true}} in the config of DeepSpeed')
    buffers = [tensor.name for tensor in tensors if tensor.name.endswith(KEEPS_ITS_DTYPE)]
    if buffers:
        result.notes.append(
            f"DeepSpeed restores no buffers from a universal checkpoint: start the run from a model that has "
            f"{buffers[0]} and {len(buffers) - 1} more"
        )
    return result


def _states(logical: LogicalTensors, model_type: object) -> dict[str, dict[str, Planned]]:
    """Adam's two states by the names of the tensors in the module."""
    found = hub_states(logical_states(logical))
    return {kind: _live(kind, found[kind], model_type) for kind in CARRIED if kind in found}


def _live(kind: str, planned: Mapping[str, Planned], model_type: object) -> dict[str, Planned]:
    named = [replace(state, name=name) for name, state in planned.items()]
    live = fused.live_tensors(named, model_type)
    return {tensor.name: replace(tensor, name=f"{tensor.name} ({kind})") for tensor in live}
