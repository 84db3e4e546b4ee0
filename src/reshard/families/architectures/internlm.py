"""InternLM, InternLM2 and InternLM3. InternEvo's names for their tensors are in `families/dialects/internevo.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from reshard.families.architectures.llama import dense
from reshard.families.config_entries import (
    Args,
    Biases,
    Config,
    ConfigEntry,
    Key,
    Values,
    contradiction,
    first,
)
from reshard.families.config_map import DERIVED_HEADS, EXPERTS_EVERYWHERE, GROUPED_HEADS, NO_QK_NORM
from reshard.families.dialects.internevo import HUB_ENDS, W123, dialects, evo_internlm, evo_internlm2
from reshard.families.dims import Dims
from reshard.families.family import MCORE, MCORE_BRIDGE, Family
from reshard.families.rope import (
    DYNAMIC_ROPE_NOTE,
    Rope,
    RotaryEmbedding,
    rope_contradictions,
    rope_parameters,
    rotary_base,
)
from reshard.families.rules import Rule, attention, decoder, ends, gated_mlp, moe, native, norms, same

# Attention has biases, the MLP has none; Megatron-LM's add_bias_linear requires both.
ZERO_BIAS = "biases of the MLP, which InternLM does not have"


class Rotary(RotaryEmbedding):
    """InternLM's `rotary`, which its own code reads instead of `rope_theta`: plain ("origin") or dynamic."""

    def to_args(self, config: Config) -> Values:
        theta = first(rope_parameters(config), ("rope_theta",), (config.get("rotary") or {}).get("base"))
        known = {} if theta is None else {"rope_theta": theta}
        return {"rotary_base": rotary_base(known, 10000.0), "use_rope_scaling": False}

    def to_config(self, args: Args) -> Values:
        theta = float(first(args, ("rotary_base",), 10000.0))
        rope = {"rope_type": "default", "rope_theta": theta}
        return {"rotary": {"base": theta, "type": "origin"}, "rope_parameters": rope}

    def contradictions(self, config: Config) -> Iterator[str]:
        yield from rope_contradictions(config)
        base, rope = (config.get("rotary") or {}).get("base"), rope_parameters(config)
        yield from contradiction({"rotary.base": base, "rope_theta": rope.get("rope_theta")})

    def notices(self, config: Config) -> Iterator[str]:
        if (config.get("rotary") or {}).get("type") == "dynamic":
            yield DYNAMIC_ROPE_NOTE


def internlm(dims: Dims) -> Iterator[Rule]:
    """Llama with biases in attention only."""
    yield from ends(dims)
    yield from decoder(dims, [*norms(dims), *attention(dims), *gated_mlp(dims, dims.ffn)])
    yield from zero_biases(dims, "mlp", dims.ffn)


def internlm_moe(dims: Dims) -> Iterator[Rule]:
    """The same with experts in every layer."""
    yield from ends(dims)
    yield from decoder(dims, [], [*norms(dims), *attention(dims), *moe(dims, names=W123)])
    yield from zero_biases(dims, "mlp.experts.{expert}", dims.expert_ffn)


def internlm2(dims: Dims) -> Iterator[Rule]:
    """Query, key and value are also fused on the Hub, in Megatron-Core's order."""
    fused = (dims.heads + 2 * dims.groups) * dims.head_dim
    wide = dims.heads * dims.head_dim
    block = [
        same("attention_norm.weight", "input_layernorm.weight", dims.hidden),
        same("ffn_norm.weight", "pre_mlp_layernorm.weight", dims.hidden),
        same("attention.wqkv.weight", "self_attention.linear_qkv.weight", fused, dims.hidden),
        same("attention.wo.weight", "self_attention.linear_proj.weight", dims.hidden, wide),
        *gated_mlp(dims, dims.ffn, "feed_forward", names=W123),
    ]
    if dims.bias:
        block.append(same("attention.wqkv.bias", "self_attention.linear_qkv.bias", fused))
        block.append(same("attention.wo.bias", "self_attention.linear_proj.bias", dims.hidden))
    yield from (replace(rule, hf=HUB_ENDS.get(rule.hf, rule.hf)) for rule in ends(dims))
    yield from decoder(dims, block)
    yield from zero_biases(dims, "mlp", dims.ffn)


def zero_biases(dims: Dims, mcore: str, ffn: int) -> Iterator[Rule]:
    """Megatron-LM's `add_bias_linear` also gives the MLP (and a router) biases. InternLM has none: store zeros."""
    if not dims.bias:
        return
    if dims.experts:
        router = native("decoder.layers.{layer}.mlp.router.bias", dims.experts)
        yield Rule("", router, tuple(range(dims.layers)), reason=ZERO_BIAS)
    for module, rows in (("linear_fc1", 2 * ffn), ("linear_fc2", dims.hidden)):
        bias = native(f"decoder.layers.{{layer}}.{mcore}.{module}.bias", rows)
        yield Rule("", bias, tuple(range(dims.layers)), dims.experts, reason=ZERO_BIAS)


ATTENTION: tuple[ConfigEntry, ...] = (
    *DERIVED_HEADS,
    Key("bias", "add_bias_linear", also=("add_qkv_bias",), default=True, assumed=False),
    NO_QK_NORM,
)
INTERNLM = Family(
    "internlm",
    "InternLMForCausalLM",
    internlm,
    (*ATTENTION, Rotary()),
    dialects=dialects("internlm", evo_internlm),
    judged=(MCORE,),
)
INTERNLM_MOE = Family(
    "internlm_moe",
    "InternLMMoEForCausalLM",
    internlm_moe,
    (
        *ATTENTION,
        Rotary(),
        Key("num_experts", "num_experts", aliases=("num_local_experts",)),
        Key("num_experts_per_token", "moe_router_topk", aliases=("num_experts_per_tok",), default=2),
        *EXPERTS_EVERYWHERE,
    ),
    dialects=dialects("internlm", evo_internlm),
    judged=(MCORE,),
)
INTERNLM2 = Family(
    "internlm2",
    "InternLM2ForCausalLM",
    internlm2,
    (*ATTENTION, Rope()),
    dialects=dialects("internlm2", evo_internlm2),
    judged=(MCORE,),
)
INTERNLM3 = Family(
    "internlm3",
    "InternLM3ForCausalLM",
    dense,
    (*GROUPED_HEADS, Rope(), Biases("qkv_bias", "bias"), NO_QK_NORM),
    judged=(MCORE, MCORE_BRIDGE),
)
