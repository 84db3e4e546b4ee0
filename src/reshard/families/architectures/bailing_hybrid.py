"""Ling 2.5: linear attention with a decay for each head; the last layer of a group has latent attention.

Source: `bailing_hybrid.py` of mcore-bridge 1.6.5, by whose modules it is computed.
"""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families.architectures.bailing_moe import HUB
from reshard.families.config_entries import Const, HeadDim, Key, SharedExperts, same_key
from reshard.families.config_map import DEEPSEEK_EXPERTS, LATENT_ATTENTION, MTP, SIGMOID_ROUTER
from reshard.families.dims import Dims
from reshard.families.family import MCORE_BRIDGE, Family
from reshard.families.rules import (
    Block,
    Rule,
    attention,
    by_kind,
    ends,
    latent_attention,
    mlp,
    moe,
    multi_token_prediction,
    norms,
    renamed,
    same,
)


def linear_attention(dims: Dims) -> Block:
    """Attention whose output is normalised in groups, and gated."""
    rows = dims.heads * dims.head_dim
    return [
        *attention(dims, fused="query_key_value"),
        same("attention.g_proj.weight", "self_attention.g_proj.weight", rows, dims.hidden),
        same("attention.g_norm.weight", "self_attention.g_norm.weight", rows),
    ]


def rules(dims: Dims) -> Iterator[Rule]:
    """All layers, in the Hub's names. The MTP layer has latent attention."""
    return renamed(_rules(dims), HUB)


def _rules(dims: Dims) -> Iterator[Rule]:
    if not dims.lightning or not dims.kv_lora:
        raise ValueError(
            "the family has layers with linear and with latent attention, and the sizes have not"
        )

    def layer(linear: bool, sparse: bool) -> Block:
        mixer = linear_attention(dims) if linear else latent_attention(dims)
        return [*norms(dims), *mixer, *(moe(dims) if sparse else mlp(dims))]

    yield from ends(dims)
    yield from by_kind([(n in dims.lightning, n in dims.sparse) for n in range(dims.layers)], layer)
    if dims.mtp:
        yield from multi_token_prediction(dims, layer(linear=False, sparse=True), copies=False)


KIMI_DELTA = "Kimi delta attention (Ling 3), which no release of megatron-core up to 0.19.2 has"
BAILING_HYBRID = Family(
    "bailing_hybrid",
    "BailingMoeV2_5ForCausalLM",
    rules,
    (
        *LATENT_ATTENTION,
        HeadDim(),
        same_key("layer_group_size"),
        same_key("group_norm_size"),
        same_key("partial_rotary_factor"),
        Const(computed={"use_qk_norm": True, "use_bias": False}),
        *(entry for entry in DEEPSEEK_EXPERTS if not isinstance(entry, SharedExperts)),
        Key("num_experts", "num_experts", aliases=("num_local_experts",)),
        SharedExperts("num_shared_experts"),
        *SIGMOID_ROUTER,
        MTP,
    ),
    computed_by=MCORE_BRIDGE,
    judged=(MCORE_BRIDGE,),
    unlike=dict.fromkeys(("short_conv_kernel_size", "kda_safe_gate"), KIMI_DELTA),
)
