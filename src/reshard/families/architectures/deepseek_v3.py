"""DeepSeek-V3: latent attention, leading dense layers, shared experts, a biased sigmoid router, MTP layers."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families.config_entries import Const, Key, RouterGroups, SigmoidNorm
from reshard.families.config_map import DEEPSEEK_EXPERTS, LATENT_ATTENTION, MTP
from reshard.families.dialects import gguf, maxtext, torchtitan
from reshard.families.dims import Dims
from reshard.families.family import MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE, Family
from reshard.families.rules import (
    Block,
    Rule,
    decoder,
    ends,
    latent_attention,
    mlp,
    moe,
    multi_token_prediction,
    norms,
)
from reshard.families.transformers_5 import MemoryNames


def layers(dims: Dims, attention: Block, *, copies: bool = True) -> Iterator[Rule]:
    """Dense and sparse layers with the same attention; MTP layers are built like the sparse ones."""
    yield from ends(dims)
    block = [*norms(dims), *attention]
    sparse = [*block, *moe(dims)]
    yield from decoder(dims, [*block, *mlp(dims)], sparse)
    yield from multi_token_prediction(dims, sparse, copies=copies)


def rules(dims: Dims) -> Iterator[Rule]:
    """DeepSeek's latent attention."""
    return layers(dims, latent_attention(dims))


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    rules,
    (
        *LATENT_ATTENTION,
        Const(config={"moe_layer_freq": 1}, computed={"rope_interleave": True}),
        *DEEPSEEK_EXPERTS,
        Key("scoring_func", "moe_router_score_function", default="sigmoid"),
        Key(
            "topk_method",
            "moe_router_enable_expert_bias",
            default="noaux_tc",
            values={"noaux_tc": True, "group_limited_greedy": False},
        ),
        RouterGroups(),
        SigmoidNorm(),
        MTP,
    ),
    dialects={torchtitan.TORCHTITAN.name: torchtitan.deepseek, **gguf.DEEPSEEK, **maxtext.DEEPSEEK},
    live=MemoryNames(),
    aliases={"kimi_k2": {}, "glm4_moe_lite": {}},
    precedence=1,
    judged=(MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE),
)
