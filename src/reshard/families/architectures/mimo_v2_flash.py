"""MiMo-V2-Flash: values smaller than queries, windows with groups and a rope of their own, MTP layers.

Source: `models/mimo_v2_flash` of Megatron-Bridge 0.6.2; `configuration_mimo_v2_flash.py` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from reshard.families.config_entries import (
    Args,
    Config,
    ConfigEntry,
    Const,
    Key,
    Values,
    first,
    same_key,
    window_of,
)
from reshard.families.config_map import GROUPED_HEADS, MTP, NO_BIAS, NO_QK_NORM, ROUTER, SIGMOID_ROUTER
from reshard.families.dims import Dims
from reshard.families.family import MEGATRON_BRIDGE, Family
from reshard.families.rope import PARTIAL_ROTARY_KEY, RotaryEmbedding, rope_parameters, rotary_base
from reshard.families.rules import (
    Block,
    Rule,
    attention,
    by_kind,
    ends,
    mlp,
    moe,
    norms,
    renamed,
    same,
    under,
)
from reshard.families.transformers_5 import GATED_EXPERTS, MemoryNames

WINDOWED, FULL = "sliding_attention", "full_attention"


def rules(dims: Dims) -> Iterator[Rule]:
    """Each layer has a window or not, and experts or not. MTP layers have a window, and no experts."""

    def mixer(windowed: bool) -> Block:
        if not windowed:
            return attention(dims)
        sinks = ("self_attn.attention_sink_bias", "self_attention.core_attention.softmax_offset")
        return [*attention(replace(dims, groups=dims.window_groups)), same(*sinks, dims.heads)]

    def layer(windowed: bool, sparse: bool) -> Block:
        return [*norms(dims), *mixer(windowed), *(moe(dims) if sparse else mlp(dims))]

    yield from ends(dims)
    yield from by_kind([(n in dims.windowed, n in dims.sparse) for n in range(dims.layers)], layer)
    for index in range(dims.mtp):
        hub, own = f"model.mtp.layers.{index}", f"mtp.layers.{index}"
        block = renamed(layer(True, False), {"post_attention_layernorm": "pre_mlp_layernorm"})
        yield from under(hub, f"{own}.transformer_layer", block)
        yield same(f"{hub}.eh_proj.weight", f"{own}.eh_proj.weight", dims.hidden, 2 * dims.hidden)
        for norm in ("enorm", "hnorm", "final_layernorm"):
            yield same(f"{hub}.{norm}.weight", f"{own}.{norm}.weight", dims.hidden)


class LayerKinds(ConfigEntry):
    """Which layers have a window, and which have experts: lists of numbers on the Hub, of names in transformers 5."""

    def to_args(self, config: Config) -> Values:
        kinds, mlps = config.get("layer_types") or (), config.get("mlp_layer_types") or ()
        groups = first(config, ("num_key_value_heads",), 0)
        return {
            "hybrid_attention_pattern": config.get("hybrid_layer_pattern")
            or [int(each == WINDOWED) for each in kinds],
            "moe_layer_freq": config.get("moe_layer_freq") or [int(each == "sparse") for each in mlps],
            "full_attn_num_query_groups": groups,
            "swa_num_query_groups": first(config, ("swa_num_key_value_heads",), 2 * groups),
        }

    def to_config(self, args: Args) -> Values:
        windows, sparse = (list(args[name]) for name in ("hybrid_attention_pattern", "moe_layer_freq"))
        return {
            "hybrid_layer_pattern": windows,
            "moe_layer_freq": sparse,
            "layer_types": [WINDOWED if each else FULL for each in windows],
            "mlp_layer_types": ["sparse" if each else "dense" for each in sparse],
            "swa_num_key_value_heads": first(args, ("swa_num_query_groups",)),
        }


class WindowSize(ConfigEntry):
    """`sliding_window_size` tokens before a token on the Hub, of which Megatron-Bridge takes one less.

    transformers counts the token itself in `sliding_window`, unless the Hub's key is there.
    """

    def to_args(self, config: Config) -> Values:
        size = config.get("sliding_window_size") or first(config, ("sliding_window",), 129) - 1
        return {"window_size": (size - 1, 0)}

    def to_config(self, args: Args) -> Values:
        before = window_of(args)
        return {} if before is None else {"sliding_window_size": before + 1}


class RopeOfWindows(RotaryEmbedding):
    """The rope of layers with a window, and that of the others: a pair in `rotary_base` of Megatron-Bridge."""

    def spellings(self) -> tuple[str, ...]:
        return (*super().spellings(), "swa_rope_theta")

    def to_args(self, config: Config) -> Values:
        rope = rope_parameters(config)
        whole = rope.get(FULL, rope)
        local = rope.get(WINDOWED) or {"rope_theta": first(config, ("swa_rope_theta",), 10000.0)}
        return {
            "rotary_base": (rotary_base(local, 10000.0), rotary_base(whole, 5000000.0)),
            "rotary_percent": first(whole, (PARTIAL_ROTARY_KEY,), 0.334),
        }

    def to_config(self, args: Args) -> Values:
        local, whole = map(float, args["rotary_base"])
        fraction = {PARTIAL_ROTARY_KEY: first(args, ("rotary_percent",), 1.0)}
        both = {
            kind: {"rope_type": "default", "rope_theta": base, **fraction}
            for kind, base in ((FULL, whole), (WINDOWED, local))
        }
        return {"rope_parameters": both, "rope_theta": whole, "swa_rope_theta": local, **fraction}


MIMO_V2_FLASH = Family(
    "mimo_v2_flash",
    "MiMoV2FlashForCausalLM",
    rules,
    (
        *GROUPED_HEADS,
        same_key("v_head_dim"),
        NO_BIAS,
        NO_QK_NORM,
        Const(
            computed={
                "attention_bias": False,
                "add_full_attention_sink_bias": False,
                "add_swa_attention_sink_bias": True,
            }
        ),
        LayerKinds(),
        WindowSize(),
        RopeOfWindows(),
        same_key("attention_value_scale"),
        Key("layernorm_epsilon", "norm_epsilon", also=("layernorm_epsilon",), aliases=("rms_norm_eps",)),
        *ROUTER,
        Key("n_routed_experts", "num_experts", aliases=("num_local_experts",)),
        Key("routed_scaling_factor", "moe_router_topk_scaling_factor", none=1.0),
        *SIGMOID_ROUTER,
        MTP,
    ),
    live=MemoryNames(GATED_EXPERTS, ((".self_attn.sinks", ".self_attn.attention_sink_bias"),)),
    computed_by=MEGATRON_BRIDGE,
    judged=(MEGATRON_BRIDGE,),
)
