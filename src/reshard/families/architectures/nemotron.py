"""Nemotron: zero-centred layer norms, half of each head rotated, and an MLP without a gate."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families.config_entries import Activation, Const, Key
from reshard.families.config_map import GROUPED_HEADS, NO_BIAS, NO_QK_NORM
from reshard.families.dims import Dims
from reshard.families.family import MCORE, MEGATRON_BRIDGE, Family
from reshard.families.rope import Rope
from reshard.families.rules import Rule, attention, decoder, ends, norms, same


def rules(dims: Dims) -> Iterator[Rule]:
    """Norms have biases. Both sides store zero-centred weights."""
    yield from ends(dims)
    yield same("model.norm.bias", "decoder.final_layernorm.bias", dims.hidden)
    block = [
        *norms(dims),
        same("input_layernorm.bias", "input_layernorm.bias", dims.hidden),
        same("post_attention_layernorm.bias", "pre_mlp_layernorm.bias", dims.hidden),
        *attention(dims),
        same("mlp.up_proj.weight", "mlp.linear_fc1.weight", dims.ffn, dims.hidden),
        same("mlp.down_proj.weight", "mlp.linear_fc2.weight", dims.hidden, dims.ffn),
    ]
    yield from decoder(dims, block)


NEMOTRON = Family(
    "nemotron",
    "NemotronForCausalLM",
    rules,
    (
        *GROUPED_HEADS,
        Rope(fraction=0.5),
        Key("norm_eps", "norm_epsilon", also=("layernorm_epsilon",), default=1e-5),
        Const(args={"normalization": "LayerNorm", "apply_layernorm_1p": True}),
        Activation(args={"swiglu": False, "squared_relu": True}, computed={"hidden_act": "relu2"}),
        NO_BIAS,
        Const(computed={"attention_bias": False, "mlp_bias": False}),
        NO_QK_NORM,
    ),
    judged=(MCORE, MEGATRON_BRIDGE),
)
