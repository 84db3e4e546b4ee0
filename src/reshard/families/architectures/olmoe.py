"""OLMoE: experts in every layer, query and key norms over all heads at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from reshard.families.config_entries import Const, Key
from reshard.families.config_map import DERIVED_HEADS, EXPERTS_EVERYWHERE, NO_BIAS, NORM_TOPK, QK_NORM
from reshard.families.dialects import gguf
from reshard.families.dims import Dims
from reshard.families.family import MCORE_BRIDGE, MEGATRON_BRIDGE, Family
from reshard.families.rope import Rope
from reshard.families.rules import Rule, attention, decoder, ends, moe, norms, same
from reshard.families.transformers_5 import MemoryNames


def rules(dims: Dims, module: str = "norm") -> Iterator[Rule]:
    """The norms over all heads are modules of the engines that compute them, each with its own name."""
    yield from ends(dims)
    wide = [
        same(f"self_attn.{name}_norm.weight", f"self_attention.{name}_{module}.weight", heads * dims.head_dim)
        for name, heads in (("q", dims.heads), ("k", dims.groups))
    ]
    yield from decoder(dims, [], [*norms(dims), *attention(replace(dims, qk_norm=False)), *wide, *moe(dims)])


OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    rules,
    (
        *DERIVED_HEADS,
        Rope(),
        NO_BIAS,
        Const(computed={"attention_bias": False, "clip_qkv": None}),
        QK_NORM,
        *EXPERTS_EVERYWHERE,
        Key("num_experts", "num_experts", aliases=("num_local_experts",), default=64),
        Key("num_experts_per_tok", "moe_router_topk", default=8),
        NORM_TOPK,
    ),
    dialects={**gguf.OLMOE, MEGATRON_BRIDGE: partial(rules, module="layernorm")},
    live=MemoryNames(),
    computed_by=MCORE_BRIDGE,
    judged=(MCORE_BRIDGE, MEGATRON_BRIDGE),
)
