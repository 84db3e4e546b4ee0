"""Names that differ between megatron-core's local modules and those that wrote a checkpoint.

TransformerEngine does not run on a CPU, but weights with its names must be verified there too. Both kinds of modules
compute the same function; if their names differ, the local model requests the names that the checkpoint uses. Names
that the checkpoint has are left to megatron-core.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

# (name in the local modules, name in the TransformerEngine modules or in another version)
_OTHER_NAMES = (
    # 0.19 renamed the layer of multi-token prediction.
    (r"\.mtp_model_layer\.", ".transformer_layer."),
    # Only TransformerEngine has a spec of delta nets.
    (r"\.input_layernorm\.(weight|bias)$", r".self_attention.in_proj.layer_norm_\1"),
    (r"\.input_layernorm\.(weight|bias)$", r".self_attention.linear_qkv.layer_norm_\1"),
    # In torch_dist, the local spec names every MLP norm as if it were fused into fc1, even in layers with experts.
    (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
    # Multi-latent attention has no key map in the local spec, so norms have their module names.
    (r"\.pre_mlp_layernorm\.(weight|bias)$", r".mlp.linear_fc1.layer_norm_\1"),
    (r"\.self_attention\.q_layernorm\.(weight|bias)$", r".self_attention.linear_q_up_proj.layer_norm_\1"),
    (r"\.self_attention\.kv_layernorm\.(weight|bias)$", r".self_attention.linear_kv_up_proj.layer_norm_\1"),
    # In legacy files, which have the names of a rank's own modules.
    (r"\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$", r".experts.\2.\3\1"),
)


def stored_name(name: str, stored: Collection[str]) -> str:
    """The name under which a checkpoint has a weight of the local modules; `name` itself if it has none."""
    names = [name]
    for pattern, replacement in _OTHER_NAMES:
        names += [re.sub(pattern, replacement, each) for each in names]
    return next((each for each in names if each in stored), name)


def legacy_to_local(chunk: Any, stored: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's stored state with the names of `chunk`; what it does not have is unchanged.

    TransformerEngine keeps the down projections of multi-latent attention complete on every tensor parallel rank, and
    the local modules shard them, so this rank's rows are cut out (megatron-core 0.12 and 0.13 saved them sharded). The
    older GroupedMLP stores all experts of a rank in two matrices, which are split.
    """
    wanted = chunk.state_dict()
    state = _separate_experts(stored, wanted)
    for name, parameter in wanted.items():
        other = stored_name(name, state)
        if other not in state:
            continue
        value = state.pop(other)
        if name.endswith("_down_proj.weight") and value.shape != parameter.shape:
            value = _own_rows(value, parameter.shape[0])
        state[name] = value
    return state


def _separate_experts(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """One fc1 and one fc2 per expert from GroupedMLP's `weight1` [H, experts·2F] and `weight2` [experts·F, H].

    Both are read as [experts, inputs, outputs], although `weight1` is declared with the experts in its columns
    (`GroupedMLP.forward` views them this way); a linear layer has [outputs, inputs].
    """
    state = dict(stored)
    for first in [name for name in stored if name.endswith(".experts.weight1")]:
        prefix = first.removesuffix("weight1")
        local = re.compile(re.escape(prefix) + r"local_experts\.\d+\.linear_fc1\.weight")
        experts = sum(1 for name in wanted if local.fullmatch(name))
        hidden = state[first].shape[0]
        fc1 = state.pop(first).view(experts, hidden, -1)
        fc2 = state.pop(f"{prefix}weight2").view(experts, -1, hidden)
        for expert in range(experts):
            state[f"{prefix}local_experts.{expert}.linear_fc1.weight"] = fc1[expert].T
            state[f"{prefix}local_experts.{expert}.linear_fc2.weight"] = fc2[expert].T
    return state


def _own_rows(whole: Any, rows: int) -> Any:
    from megatron.core import parallel_state

    start = parallel_state.get_tensor_model_parallel_rank() * rows
    return whole[start : start + rows]
