"""Gemma 4: layers with a window and layers without one differ in heads, and some share keys and values.

Megatron-Bridge computes it in two models: one with experts, and a dense one with embeddings of their own for each
layer. It saves attention by kind of layer. Source: `models/gemma` and `models/gemma_vl` of Megatron-Bridge 0.6.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from reshard.families.architectures.gemma import GELU, GLOBAL, LOCAL, TANH
from reshard.families.config_entries import (
    Activation,
    Args,
    Config,
    ConfigEntry,
    Const,
    Key,
    LayerTypes,
    SlidingWindow,
    Values,
    first,
    same_key,
)
from reshard.families.config_map import GROUPED_HEADS, NO_BIAS, TIED
from reshard.families.dims import Dims, windowed_layers
from reshard.families.family import MEGATRON_BRIDGE, Family
from reshard.families.outer_model import CarriedTensors, OuterModel
from reshard.families.rope import RotaryEmbedding, rope_parameters, rotary_base
from reshard.families.rules import (
    NEVER_READ,
    Block,
    Rule,
    attention,
    ends,
    gated_mlp,
    natively_renamed,
    renamed,
    same,
    stacked_experts,
    under,
)
from reshard.families.transformers_5 import by_transformers


def rules(dims: Dims) -> Iterator[Rule]:
    """Four kinds of layers: with a window or without, with keys and values of their own or those of an earlier one."""
    yield from ends(dims)
    if dims.layer_dim:
        width = dims.layers * dims.layer_dim
        yield same(
            "model.embed_tokens_per_layer.weight", "per_layer_embedding.weight", dims.layer_vocab, width
        )
        yield same(
            "model.per_layer_model_projection.weight", "per_layer_model_proj.weight", width, dims.hidden
        )
        yield same("model.per_layer_projection_norm.weight", "per_layer_proj_norm.weight", dims.layer_dim)
    kinds = {
        layer: (layer in dims.windowed, layer >= dims.layers - dims.sharing) for layer in range(dims.layers)
    }
    for windowed, shared in dict.fromkeys(kinds.values()):
        layers = [layer for layer, kind in kinds.items() if kind == (windowed, shared)]
        block = [*_attention(dims, windowed, shared), *_channels(dims, shared)]
        kind = {"self_attention.": f"self_attention_{'sliding' if windowed else 'global'}."}
        own = natively_renamed(block, kind)
        yield from under("model.layers.{layer}", "decoder.layers.{layer}", own, layers)


def _attention(dims: Dims, windowed: bool, shared: bool) -> Iterator[Rule]:
    """Without a window, values may be keys. Where Megatron-Bridge never reads keys or values, the Hub may lack them."""
    if not windowed:
        dims = replace(dims, head_dim=dims.global_head_dim, groups=dims.global_groups)
    unread = ["v_proj"] if dims.keys_are_values and not windowed else []
    unread = ["k_proj", "v_proj", "k_norm"] if shared else unread
    for rule in attention(replace(dims, qk_norm=True)):
        is_read = not any(f".{name}." in rule.hf for name in unread)
        yield rule if is_read else replace(rule, reason=NEVER_READ)


def _channels(dims: Dims, shared: bool) -> Block:
    """Everything else in a layer."""
    names = _NORMS_BESIDE_EXPERTS if dims.experts else _NORMS
    block = [same(f"{hf}.weight", f"{own}weight", dims.hidden) for hf, own in names.items()]
    block.append(same("layer_scalar", "layer_scalar", 1))
    if dims.layer_dim:
        block += [
            same("per_layer_input_gate.weight", "per_layer_input_gate.weight", dims.layer_dim, dims.hidden),
            same("per_layer_projection.weight", "per_layer_projection.weight", dims.hidden, dims.layer_dim),
            same("post_per_layer_input_norm.weight", "post_per_layer_input_norm.weight", dims.hidden),
        ]
    if not dims.experts:
        return [*block, *gated_mlp(dims, dims.ffn * (1 + (shared and dims.wide_sharing)))]
    return [
        *block,
        same("router.proj.weight", "mlp.router.weight", dims.experts, dims.hidden),
        same("router.scale", "mlp.router.scale", dims.hidden),
        same("router.per_expert_scale", "mlp.router.per_expert_scale", dims.experts),
        *gated_mlp(dims, dims.shared_ffn, "mlp", "mlp.shared_experts"),
        *renamed(stacked_experts(dims, transposed=False), {"mlp.": ""}),
    ]


_NORMS = {
    "input_layernorm": "input_layernorm.",
    "post_attention_layernorm": "post_self_attn_layernorm.",
    "pre_feedforward_layernorm": "pre_mlp_layernorm.",
    "post_feedforward_layernorm": "post_mlp_layernorm.",
}
_NORMS_BESIDE_EXPERTS = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm_",
    "post_attention_layernorm": "self_attention.linear_proj.post_layernorm.",
    "pre_feedforward_layernorm": "pre_shared_expert_layernorm.",
    "pre_feedforward_layernorm_2": "pre_mlp_layernorm.",
    "post_feedforward_layernorm_1": "mlp.post_shared_expert_layernorm.",
    "post_feedforward_layernorm_2": "mlp.post_moe_layernorm.",
    "post_feedforward_layernorm": "post_ffn_layernorm.",
}


class Ropes(RotaryEmbedding):
    """Plain in layers with a window; in the others, only the first part of the pairs is turned ("proportional")."""

    def to_args(self, config: Config) -> Values:
        rope = rope_parameters(config)
        local, whole = rope.get(LOCAL, {}), rope.get(GLOBAL, {})
        bases = rotary_base(local, 10000.0), rotary_base(whole, 1000000.0)
        part = first(whole, ("partial_rotary_factor",), 0.25)
        if config.get("enable_moe_block"):
            return {"rotary_base": bases, "global_rotary_percent": part}
        names = ("sliding_window_rope_base", "full_attention_rope_base", "full_attention_rope_partial_factor")
        return dict(zip(names, (*bases, part), strict=True))

    def to_config(self, args: Args) -> Values:
        names = ("sliding_window_rope_base", "full_attention_rope_base")
        local, whole = map(float, [args[name] for name in names] if names[0] in args else args["rotary_base"])
        part = first(args, ("full_attention_rope_partial_factor", "global_rotary_percent"), 0.25)
        turned = {"rope_type": "proportional", "rope_theta": whole, "partial_rotary_factor": part}
        return {"rope_parameters": {LOCAL: {"rope_type": "default", "rope_theta": local}, GLOBAL: turned}}

    def differs(self, config: Config) -> Iterator[tuple[str, str]]:
        rope = rope_parameters(config)
        for layers, only in ((LOCAL, "default"), (GLOBAL, "proportional")):
            kind = rope.get(layers, {}).get("rope_type", only)
            if kind != only:
                yield (
                    "rope_parameters",
                    f"rope_type of {layers} is {kind!r}; Megatron-Bridge computes {only!r}",
                )


class Windows(LayerTypes):
    """The layers with a window: all but every N-th in the model with experts, whose last layer has none."""

    def to_config(self, args: Args) -> Values:
        windowed = windowed_layers(args, args.get("num_layers", 0))
        kinds = [LOCAL if layer in windowed else GLOBAL for layer in range(args.get("num_layers", 0))]
        return {"layer_types": kinds}

    def differs(self, config: Config) -> Iterator[tuple[str, str]]:
        kinds = [kind == GLOBAL for kind in config.get("layer_types") or ()]
        every = kinds.index(True) + 1 if True in kinds else len(kinds) + 1
        regular = [(layer + 1) % every == 0 for layer in range(len(kinds))]
        if config.get("enable_moe_block") and kinds != regular:
            # not layer_types, which only tell what is computed in most families
            yield (
                "enable_moe_block",
                "layer_types differ from Megatron-Bridge's: every N-th layer is without a window",
            )


class GlobalHeads(ConfigEntry):
    """The heads of layers without a window, which later releases of transformers save as `per_layer_config`."""

    def to_args(self, config: Config) -> Values:
        size, groups = self._stated(config)
        own = groups if config.get("attention_k_eq_v") else None
        return {
            "global_kv_channels": size or config.get("head_dim"),
            "num_global_query_groups": own or config.get("num_key_value_heads"),
        }

    def _stated(self, config: Config) -> tuple[int, int | None]:
        layers = config.get("per_layer_config")
        saved: Config = next(iter((layers or {}).values()), {})
        size = saved.get("head_dim", 512 if layers is None else config.get("head_dim"))
        groups = first(config, ("num_global_key_value_heads",), saved.get("num_key_value_heads"))
        return first(config, ("global_head_dim",), size), groups

    def to_config(self, args: Args) -> Values:
        size = first(args, ("global_kv_channels", "global_head_dim"), 512)
        groups = first(args, ("num_global_query_groups", "num_global_key_value_heads"))
        tied = bool(args.get("attention_k_eq_v"))
        return {"global_head_dim": size, "num_global_key_value_heads": groups if tied else None}

    def spellings(self) -> tuple[str, ...]:
        return ("per_layer_config",)

    def differs(self, config: Config) -> Iterator[tuple[str, str]]:
        other = {key for each in (config.get("per_layer_config") or {}).values() for key in each}
        if other := other - {"head_dim", "num_key_value_heads"}:
            key = "per_layer_config"
            yield key, f"{key} has {', '.join(sorted(other))}; Megatron-Bridge's layers differ in heads only"
        if config.get("use_bidirectional_attention") == "all":
            key = "use_bidirectional_attention"
            yield key, f"{key} is 'all'; Megatron-Bridge's mask is causal"
        key, (_, groups) = "num_global_key_value_heads", self._stated(config)
        if config.get("attention_k_eq_v"):
            if groups is None and config.get("enable_moe_block"):
                yield key, f"{key} is not set, without which Megatron-Bridge's values are no keys"
        elif groups not in (None, config.get("num_key_value_heads")):
            yield (
                key,
                f"{key} is {groups}, which counts only with attention_k_eq_v; Megatron-Bridge builds as many",
            )


class ExpertBlock(ConfigEntry):
    """`enable_moe_block`: experts beside the MLP, which is Megatron-Bridge's shared expert."""

    def to_args(self, config: Config) -> Values:
        if not config.get("enable_moe_block"):
            return {"num_experts": None, "qk_layernorm": False}
        return {
            "num_experts": config.get("num_experts"),
            "moe_router_topk": config.get("top_k_experts"),
            "moe_ffn_hidden_size": config.get("moe_intermediate_size"),
            "moe_shared_expert_intermediate_size": config.get("intermediate_size"),
            "moe_layer_freq": 1,
            "qk_layernorm": True,
        }

    def to_config(self, args: Args) -> Values:
        experts = args.get("num_experts")
        return {
            "enable_moe_block": bool(experts),
            "num_experts": experts,
            "top_k_experts": args.get("moe_router_topk") if experts else None,
            "moe_intermediate_size": args.get("moe_ffn_hidden_size") if experts else None,
        }

    def differs(self, config: Config) -> Iterator[tuple[str, str]]:
        for key in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
            if config.get("enable_moe_block") and config.get(key):
                yield key, f"{key} is {config[key]}; Megatron-Bridge's model with experts has none"


GEMMA4_TEXT = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    rules,
    (
        *GROUPED_HEADS,
        GlobalHeads(),
        NO_BIAS,
        Const(computed={"attention_bias": False}),
        TIED,
        Ropes(),
        Activation(GELU, computed={"hidden_activation": TANH}),
        SlidingWindow(default=512, listed=True),
        Windows(full=6, assumed=6),
        Const(args={"softmax_scale": 1.0, "moe_router_pre_softmax": True}),
        ExpertBlock(),
        same_key("attention_k_eq_v", default=False),
        same_key("num_kv_shared_layers", default=0),
        same_key("use_double_wide_mlp", default=False),
        Key("hidden_size_per_layer_input", "per_layer_embed_dim", default=256, assumed=0),
        Key("vocab_size_per_layer_input", "per_layer_embed_vocab_size", default=262144),
        same_key("final_logit_softcapping", none=None),
    ),
    computed_by=MEGATRON_BRIDGE,
    judged=(MEGATRON_BRIDGE,),
)
GEMMA4 = replace(
    GEMMA4_TEXT,
    name="gemma4",
    architecture="Gemma4ForConditionalGeneration",
    live=by_transformers("gemma4", "Gemma4ForConditionalGeneration"),
    within=OuterModel(
        hub=(("model.", "model.language_model."),),
        carried=(
            CarriedTensors("model.vision_tower.", "vision_tower."),
            CarriedTensors("model.embed_vision.", "embed_vision."),
            CarriedTensors("model.audio_tower.", "audio_tower.", optional=True),
            CarriedTensors("model.embed_audio.", "embed_audio.", optional=True),
        ),
    ),
)
