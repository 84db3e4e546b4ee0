"""Nemotron-H and Nemotron 3: a pattern makes each layer Mamba 2, attention, an MLP or experts.

Megatron-Core's MambaModel computes it; Megatron-Bridge and Megatron-LM build it. Source: `ssm/mamba_mixer.py` of
megatron-core 0.16.1, and `models/nemotronh` of Megatron-Bridge 0.3.1.
"""

from __future__ import annotations

from collections.abc import Iterator

from reshard.algebra.views import concat
from reshard.families.config_entries import (
    Activation,
    Args,
    Config,
    ConfigEntry,
    Const,
    Key,
    Values,
    same_key,
)
from reshard.families.config_map import GROUPED_HEADS, NO_BIAS, NO_QK_NORM, ROUTER, SIGMOID_ROUTER
from reshard.families.dims import Dims, layer_pattern
from reshard.families.family import MEGATRON_BRIDGE, Family
from reshard.families.outer_model import OuterModel
from reshard.families.rules import Block, Rule, attention, ends, native, renamed, same, under
from reshard.families.transformers_5 import ExpertNames, MemoryNames

MAMBA, ATTENTION, MLP, EXPERTS = "M*-E"
"""Symbols for the kinds of layers on the Hub and in Megatron-LM's `--hybrid-layer-pattern`, which was
`--hybrid-override-pattern` until 0.16."""

KINDS = {MAMBA: "linear_attention", ATTENTION: "full_attention", MLP: "mlp", EXPERTS: "moe"}
"""Their names in `layers_block_type` of transformers 5."""


def mamba(dims: Dims) -> Block:
    """torch_dist stores the parts of `in_proj` and of the convolution separately, because each is sharded by itself."""
    heads, size, groups, state = dims.mamba
    parts = {"z": heads * size, "x": heads * size, "B": groups * state, "C": groups * state, "dt": heads}

    def joined(name: str, names: str, *inner: int) -> Rule:
        return Rule(
            f"mixer.{name}",
            concat([native(f"mixer.{name}.{part}", parts[part], *inner) for part in names.split()]),
        )

    return [
        same("norm.weight", "mixer.in_proj.layer_norm_weight", dims.hidden),
        joined("in_proj.weight", "z x B C dt", dims.hidden),
        joined("conv1d.weight", "x B C", 1, 4),
        joined("conv1d.bias", "x B C"),
        *(same(f"mixer.{name}", f"mixer.{name}", heads) for name in ("A_log", "D", "dt_bias")),
        same("mixer.norm.weight", "mixer.norm.weight", heads * size),
        same("mixer.out_proj.weight", "mixer.out_proj.weight", dims.hidden, heads * size),
    ]


def mlp(dims: Dims, ffn: int, hf: str, mcore: str) -> Block:
    """An MLP without a gate."""
    return [
        same(f"{hf}.up_proj.weight", f"{mcore}.linear_fc1.weight", ffn, dims.hidden),
        same(f"{hf}.down_proj.weight", f"{mcore}.linear_fc2.weight", dims.hidden, ffn),
    ]


def experts(dims: Dims) -> Block:
    """Router, experts and a shared expert, without gates."""
    one = mlp(dims, dims.expert_ffn, "mixer.experts.{expert}", "mlp.experts.{expert}")
    return [
        same("norm.weight", "pre_mlp_layernorm.weight", dims.hidden),
        same("mixer.gate.weight", "mlp.router.weight", dims.experts, dims.hidden),
        same("mixer.gate.e_score_correction_bias", "mlp.router.expert_bias", dims.experts),
        *(Rule(rule.hf, rule.view, experts=dims.experts) for rule in one),
        *(
            mlp(dims, dims.shared_ffn, "mixer.shared_experts", "mlp.shared_experts")
            if dims.shared_ffn
            else []
        ),
    ]


def rules(dims: Dims) -> Iterator[Rule]:
    """Every layer has one norm, before its only block."""
    final = same("model.norm.weight", "decoder.final_norm.weight", dims.hidden)
    yield from (final if rule.hf == final.hf else rule for rule in ends(dims))
    heads = renamed(attention(dims), {"self_attn.": "mixer."})
    blocks: dict[str, Block] = {
        MAMBA: mamba(dims),
        ATTENTION: [same("norm.weight", "input_layernorm.weight", dims.hidden), *heads],
        MLP: [
            same("norm.weight", "pre_mlp_layernorm.weight", dims.hidden),
            *mlp(dims, dims.ffn, "mixer", "mlp"),
        ],
        EXPERTS: experts(dims),
    }
    for kind, block in blocks.items():
        layers = tuple(layer for layer, symbol in enumerate(dims.pattern) if symbol == ord(kind))
        if layers:
            yield from under("model.layers.{layer}", "decoder.layers.{layer}", block, layers)


class Pattern(ConfigEntry):
    """The kind of each layer."""

    def to_args(self, config: Config) -> Values:
        names = {name: symbol for symbol, name in KINDS.items()} | {"mamba": MAMBA, "attention": ATTENTION}
        named = (names[kind] for kind in config.get("layers_block_type") or ())
        pattern = config.get("hybrid_override_pattern") or "".join(named)
        return {
            "hybrid_override_pattern": pattern,
            "is_hybrid_model": True,
            "moe_layer_freq": [int(symbol == EXPERTS) for symbol in pattern],
        }

    def to_config(self, args: Args) -> Values:
        pattern = layer_pattern(args).replace("|", "")
        return {
            "hybrid_override_pattern": pattern,
            "layers_block_type": [KINDS[symbol] for symbol in pattern],
        }


NEMOTRON_H = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    rules,
    (
        *GROUPED_HEADS,
        Pattern(),
        Key("layer_norm_epsilon", "norm_epsilon", also=("layernorm_epsilon",), default=1e-5),
        same_key("mamba_num_heads"),
        same_key("mamba_head_dim"),
        Key("n_groups", "mamba_num_groups"),
        Key("ssm_state_size", "mamba_state_dim"),
        Const(
            args={"position_embedding_type": "none", "use_rotary_position_embeddings": False},
            computed={"conv_kernel": 4, "use_conv_bias": True, "mamba_hidden_act": "silu"},
        ),
        Activation(args={"swiglu": False, "squared_relu": True}, computed={"mlp_hidden_act": "relu2"}),
        NO_BIAS,
        Const(computed={"attention_bias": False, "mlp_bias": False, "use_bias": False}),
        NO_QK_NORM,
        *ROUTER,
        Key("n_routed_experts", "num_experts"),
        same_key("moe_shared_expert_intermediate_size"),
        Key("routed_scaling_factor", "moe_router_topk_scaling_factor", none=1.0),
        Const(args={"moe_router_dtype": "fp32"}),
        *SIGMOID_ROUTER,
    ),
    live=MemoryNames(ExpertNames("mixer.experts", gate=""), (("model.", "backbone."),)),
    computed_by=MEGATRON_BRIDGE,
    within=OuterModel(
        config=(),
        hub=(
            ("model.embed_tokens.", "backbone.embeddings."),
            ("model.norm.", "backbone.norm_f."),
            ("model.", "backbone."),
        ),
    ),
    judged=(MEGATRON_BRIDGE,),
)
