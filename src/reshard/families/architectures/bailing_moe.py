"""Ling and Ring (BailingMoE): GLM-4.5's layers under other names; the first version has a softmax router."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families.architectures.deepseek_v3 import layers
from reshard.families.config_entries import (
    Args,
    Config,
    ConfigEntry,
    Const,
    Key,
    RouterGroups,
    SharedExperts,
    SigmoidNorm,
    Values,
)
from reshard.families.config_map import DEEPSEEK_EXPERTS, GROUPED_HEADS, MTP, NO_BIAS, NORM_TOPK
from reshard.families.dims import Dims
from reshard.families.family import MCORE_BRIDGE, MEGATRON_BRIDGE, Family
from reshard.families.rope import Rope
from reshard.families.rules import Rule, attention, renamed

HUB = {
    "model.embed_tokens.": "model.word_embeddings.",
    "self_attn.o_proj.": "attention.dense.",
    "self_attn.q_norm.": "attention.query_layernorm.",
    "self_attn.k_norm.": "attention.key_layernorm.",
    "self_attn.": "attention.",
    "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
    "shared_head.norm.": "final_layernorm.",
}


def rules(dims: Dims) -> Iterator[Rule]:
    """Queries, keys and values are fused into one projection, and MTP layers have no copy of embedding and head."""
    return renamed(layers(dims, attention(dims, fused="query_key_value"), copies=False), HUB)


class Router(ConfigEntry):
    """Router scores: softmax in the first version; sigmoid, with a selection bias, in the second."""

    score = Key("score_function", "moe_router_score_function", default="softmax")
    bias = Key("moe_router_enable_expert_bias", "moe_router_enable_expert_bias", default=False)

    def to_args(self, config: Config) -> Values:
        args = {**self.score.to_args(config), **self.bias.to_args(config)}
        return args | self._norm(args).to_args(config)

    def to_config(self, args: Args) -> Values:
        return {**self.score.to_config(args), **self.bias.to_config(args), **self._norm(args).to_config(args)}

    def _norm(self, args: Args) -> ConfigEntry:
        return SigmoidNorm() if args.get("moe_router_score_function") == "sigmoid" else NORM_TOPK


# The second version stores the width of the shared experts next to their number.
BAILING_MOE = Family(
    "bailing_moe",
    "BailingMoeV2ForCausalLM",
    rules,
    (
        *GROUPED_HEADS,
        Rope(default_theta=600000.0, fraction=1.0),
        NO_BIAS,
        Const(config={"use_bias": False, "use_qkv_bias": False}, computed={"norm_head": False}),
        Key("use_qk_norm", "qk_layernorm", default=False),
        *(entry for entry in DEEPSEEK_EXPERTS if not isinstance(entry, SharedExperts)),
        Key("num_experts", "num_experts"),
        SharedExperts("num_shared_experts"),
        Router(),
        RouterGroups(),
        MTP,
    ),
    judged=(MCORE_BRIDGE, MEGATRON_BRIDGE),
    precedence=-1,  # Megatron-Core's tensors also match other families
)
