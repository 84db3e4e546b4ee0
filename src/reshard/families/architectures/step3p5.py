"""Step-3.5: a gate for each head, windows with heads of their own, stacked experts, and MTP layers.

Megatron-Bridge computes the gates with megatron-core's gate for each dimension, and repeats each for its head.
Source: `models/stepfun` of Megatron-Bridge 0.6.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from reshard.families.config_entries import Args, Config, ConfigEntry, Const, Key, Values, same_key
from reshard.families.config_map import GROUPED_HEADS, MTP, NO_BIAS
from reshard.families.dims import Dims
from reshard.families.family import MEGATRON_BRIDGE, Family
from reshard.families.rules import (
    Block,
    Rule,
    attention,
    by_kind,
    ends,
    gated_mlp,
    mlp,
    native,
    norms,
    renamed,
    same,
    stacked,
    under,
)

WINDOWED, FULL = "sliding_attention", "full_attention"


def rules(dims: Dims) -> Iterator[Rule]:
    """Each layer has a window or not, and experts or not. MTP layers have no experts."""

    def layer(windowed: bool, sparse: bool) -> Block:
        heads = replace(dims, heads=dims.window_heads, groups=dims.window_groups) if windowed else dims
        return [*norms(dims), *_attention(heads), *(_moe(dims) if sparse else mlp(dims))]

    yield from ends(dims)
    yield from by_kind([(n in dims.windowed, n in dims.sparse) for n in range(dims.layers)], layer)
    head = native("output_layer.weight", dims.padded_vocab, dims.hidden)
    for index in range(dims.mtp):
        number = dims.layers + index
        hub, own = f"model.layers.{number}", f"mtp.layers.{index}"
        yield from under(hub, f"{own}.transformer_layer", layer(number in dims.windowed, False))
        yield same(f"{hub}.eh_proj.weight", f"{own}.eh_proj.weight", dims.hidden, 2 * dims.hidden)
        names = {"enorm": "enorm", "hnorm": "hnorm", "transformer.shared_head.norm": "final_layernorm"}
        for name, engine in names.items():
            yield same(f"{hub}.{name}.weight", f"{own}.{engine}.weight", dims.hidden)
        yield Rule(f"{hub}.transformer.shared_head.output.weight", head[: dims.vocab], copy=True)


def _attention(dims: Dims) -> Iterator[Rule]:
    queries, *others = attention(replace(dims, output_gate=True))
    heads = queries.view.split(0, dims.heads, 2, dims.head_dim)
    yield replace(queries, view=heads[:, 0].merge(0))
    for row in range(dims.head_dim):
        yield Rule("self_attn.g_proj.weight", heads[:, 1, row], repeats=row > 0)
    yield from others


def _moe(dims: Dims) -> Block:
    ffn, fc1 = dims.expert_ffn, (2 * dims.expert_ffn, dims.hidden)
    experts = [
        stacked("gate_proj.weight", "linear_fc1.weight", dims.experts, fc1, lambda view: view[:ffn]),
        stacked("up_proj.weight", "linear_fc1.weight", dims.experts, fc1, lambda view: view[ffn:]),
        stacked("down_proj.weight", "linear_fc2.weight", dims.experts, (dims.hidden, ffn), lambda view: view),
    ]
    return [
        same("moe.gate.weight", "mlp.router.weight", dims.experts, dims.hidden),
        same("moe.router_bias", "mlp.router.expert_bias", dims.experts),
        *renamed(experts, {"mlp.experts.": "moe."}),
        *gated_mlp(dims, dims.shared_ffn, "share_expert", "mlp.shared_experts"),
    ]


class LayerKinds(ConfigEntry):
    """Which layers have a window, MTP layers among them, and which have experts: a text of numbers on the Hub."""

    def to_args(self, config: Config) -> Values:
        listed = config.get("moe_layers_enum") or ()
        sparse = set(map(int, listed.split(",") if isinstance(listed, str) else listed))
        return {
            "hybrid_attention_pattern": [int(kind == WINDOWED) for kind in config.get("layer_types") or ()],
            "moe_layer_freq": [int(layer in sparse) for layer in range(config.get("num_hidden_layers", 0))],
        }

    def to_config(self, args: Args) -> Values:
        sparse = [str(layer) for layer, each in enumerate(args["moe_layer_freq"]) if each]
        kinds = [WINDOWED if each else FULL for each in args["hybrid_attention_pattern"]]
        return {"moe_layers_enum": ",".join(sparse), "layer_types": kinds}


class WindowHeads(ConfigEntry):
    """The heads of layers with a window."""

    def to_args(self, config: Config) -> Values:
        own = config.get("attention_other_setting") or {}
        return {
            "swa_num_attention_heads": own.get("num_attention_heads", 96),
            "swa_num_query_groups": own.get("num_attention_groups", 8),
        }

    def to_config(self, args: Args) -> Values:
        own = {"attention_type": WINDOWED, "head_dim": args["kv_channels"]}
        own["num_attention_heads"] = args["swa_num_attention_heads"]
        own["num_attention_groups"] = args["swa_num_query_groups"]
        return {"attention_other_setting": own}


class PlainRopes(ConfigEntry):
    """A base and a part of the pairs for each layer. Megatron-Bridge leaves out a scaling as in Llama 3."""

    def differs(self, config: Config) -> Iterator[tuple[str, str]]:
        if scaling := config.get("rope_scaling"):
            yield "rope_parameters", f"rope_scaling is {scaling}; Megatron-Bridge's model has none"


STEP3P5 = Family(
    "step3p5",
    "Step3p5ForCausalLM",
    rules,
    (
        *GROUPED_HEADS,
        Key("num_attention_groups", "num_query_groups"),
        Const(
            args={"group_query_attention": True, "head_wise_attn_gate": True},
            computed={"use_head_wise_attn_gate": True, "norm_expert_weight": True},
        ),
        Key("zero_centered", "apply_layernorm_1p", default=True),
        Key("use_qk_norm", "qk_layernorm", default=False),
        NO_BIAS,
        LayerKinds(),
        same_key("sliding_window", default=512),
        WindowHeads(),
        PlainRopes(),
        Key("rope_theta", "rotary_base_per_layer"),
        Key("partial_rotary_factors", "rotary_percents"),
        same_key("swiglu_limits"),
        same_key("swiglu_limits_shared"),
        Key("moe_num_experts", "num_experts"),
        Key("moe_top_k", "moe_router_topk"),
        Key("moe_intermediate_size", "moe_ffn_hidden_size"),
        Key("share_expert_dim", "moe_shared_expert_intermediate_size", aliases=("share_expert_dims",)),
        Key("moe_router_scaling_factor", "moe_router_topk_scaling_factor", none=1.0),
        Key("moe_router_activation", "moe_router_score_function", default="softmax"),
        Key("use_moe_router_bias", "moe_router_enable_expert_bias", default=False),
        MTP,
    ),
    computed_by=MEGATRON_BRIDGE,
    judged=(MEGATRON_BRIDGE,),
)
