"""Hunyuan 3: GLM-4.5's layers under other names."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families.architectures.deepseek_v3 import layers
from reshard.families.config_entries import Const, DenseFirst, Key, SharedExperts, SigmoidNorm
from reshard.families.config_map import GROUPED_HEADS, MTP, NO_BIAS, QK_NORM, ROUTER
from reshard.families.dims import Dims
from reshard.families.family import MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE, Family
from reshard.families.rope import Rope
from reshard.families.rules import Rule, attention, renamed
from reshard.families.transformers_5 import MemoryNames

HUB = {
    "mlp.gate.weight": "mlp.router.gate.weight",
    "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
    "mlp.shared_experts.": "mlp.shared_mlp.",
    "shared_head.norm.": "final_layernorm.",
}


def rules(dims: Dims) -> Iterator[Rule]:
    """The MTP layer has no copy of embedding and head. Source of its names: hy_v3_mtp.py of vLLM."""
    return renamed(layers(dims, attention(dims), copies=False), HUB)


HY_V3 = Family(
    "hy_v3",
    "HYV3ForCausalLM",
    rules,
    (
        *GROUPED_HEADS,
        Rope(default_theta=11158840.0),
        NO_BIAS,
        QK_NORM,
        Const(config={"attention_bias": False, "mlp_bias": False, "qk_norm": True}),
        *ROUTER,
        Key("num_experts", "num_experts", aliases=("num_local_experts",)),
        DenseFirst(default=1, listed=True),
        SharedExperts("num_shared_experts"),
        Key("router_scaling_factor", "moe_router_topk_scaling_factor", default=2.826, none=1.0),
        Const(
            args={
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_dtype": "fp32",
            },
            config={"moe_router_enable_expert_bias": True},
            computed={"moe_router_use_sigmoid": True},
        ),
        SigmoidNorm("route_norm"),
        MTP,
    ),
    live=MemoryNames(
        renames=(
            ("mlp.gate.weight", "mlp.router.gate.weight"),
            ("mlp.e_score_correction_bias", "mlp.expert_bias"),
            ("mlp.shared_experts.", "mlp.shared_mlp."),
        )
    ),
    judged=(MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE),
    precedence=-1,  # Megatron-Core's tensors also match other families
)
