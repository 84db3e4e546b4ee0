"""gpt-oss: biases everywhere, a learnable sink in every softmax, experts stacked on the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from reshard.algebra.views import View
from reshard.families.config_entries import (
    Activation,
    Args,
    Config,
    Const,
    Key,
    LayerTypes,
    SlidingWindow,
    Values,
    first,
)
from reshard.families.config_map import EXPERTS_EVERYWHERE, GROUPED_HEADS, NO_QK_NORM
from reshard.families.dialects import gguf, torchtitan
from reshard.families.dims import Dims
from reshard.families.family import MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE, Family
from reshard.families.rope import RotaryEmbedding, rope_contradictions, rope_parameters, rotary_base
from reshard.families.rules import Block, Rule, attention, decoder, ends, norms, same, stacked


def experts(dims: Dims) -> Block:
    """All experts of a layer in one tensor, each [inputs, outputs], with gate and up features interleaved."""
    if not dims.experts:
        raise ValueError("the family has experts, and the sizes have none")

    def in_turn(fc1: View) -> View:
        halves = fc1.split(0, 2, dims.expert_ffn)
        return halves.permute(*reversed(range(len(halves.shape)))).merge(-2)

    wide = 2 * dims.expert_ffn
    return [
        stacked("gate_up_proj", "linear_fc1.weight", dims.experts, (wide, dims.hidden), in_turn),
        stacked("gate_up_proj_bias", "linear_fc1.bias", dims.experts, (wide,), in_turn),
        stacked(
            "down_proj",
            "linear_fc2.weight",
            dims.experts,
            (dims.hidden, dims.expert_ffn),
            lambda fc2: fc2.permute(1, 0),
        ),
        stacked("down_proj_bias", "linear_fc2.bias", dims.experts, (dims.hidden,), lambda bias: bias),
    ]


def rules(dims: Dims) -> Iterator[Rule]:
    """Every layer has experts, and a sink for each query head."""
    yield from ends(dims)
    own = [
        same("self_attn.sinks", "self_attention.core_attention.softmax_offset", dims.heads),
        same("mlp.router.weight", "mlp.router.weight", dims.experts, dims.hidden),
        same("mlp.router.bias", "mlp.router.bias", dims.experts),
    ]
    yield from decoder(dims, [], [*norms(dims), *attention(dims), *own, *experts(dims)])


@dataclass(frozen=True)
class YarnRope(RotaryEmbedding):
    """YaRN without latent attention (gpt-oss): `--position-embedding-type yarn` and its parameters.

    Source: GPTModel of megatron-core 0.15 to 0.16, which reads `yarn_*` from its config; Megatron-LM core_v0.19.0,
    `megatron/training/argument_utils.py`, for the arguments. Megatron-Bridge sets the same on its model provider.
    """

    default_theta: float

    def contradictions(self, config: Config) -> Iterator[str]:
        yield from rope_contradictions(config)

    def to_args(self, config: Config) -> Values:
        stated = rope_parameters(config)
        # The defaults of transformers differ between a config without a rope and one that states it.
        rope = {**GPT_OSS_YARN, **({"truncate": True} if "rope_type" in stated else {}), **stated}
        return {
            "rotary_base": rotary_base(rope, self.default_theta),
            "use_rope_scaling": False,
            "use_rotary_position_embeddings": False,  # True would select a plain rope
            "position_embedding_type": "yarn",
            "rotary_scaling_factor": rope["factor"],
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
            **{f"yarn_{key}": rope[key] for key in YARN_KEYS},
            "yarn_correction_range_round_to_int": rope["truncate"],
        }

    def to_config(self, args: Args) -> Values:
        rope = {key: first(args, (f"yarn_{key}",), GPT_OSS_YARN[key]) for key in YARN_KEYS}
        rope["factor"] = first(args, ("rotary_scaling_factor",), 32.0)
        rope["truncate"] = first(args, ("yarn_correction_range_round_to_int",), True)
        rope["rope_theta"] = float(first(args, ("rotary_base",), self.default_theta))
        return {"rope_parameters": {"rope_type": "yarn", **rope}}

    def differs(self, config: Config) -> Iterator[tuple[str, str]]:
        rope = rope_parameters(config)
        kind = rope.get("rope_type", "yarn")
        if kind != "yarn":
            yield (
                "rope_parameters",
                f"rope_type is {kind!r}; Megatron-LM's model of this family computes YaRN",
            )
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            if rope.get(key) is not None:
                yield (
                    "rope_parameters",
                    f"{key} of the yarn rope is {rope[key]}; Megatron-LM's model of this family has its own",
                )

    def notices(self, config: Config) -> Iterator[str]:
        yield "YaRN without latent attention; it takes Megatron-Bridge, or Megatron-LM core_v0.19.0 or later"


YARN_KEYS = ("original_max_position_embeddings", "beta_fast", "beta_slow")
GPT_OSS_YARN: Values = {
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
"""The defaults of transformers for gpt-oss."""


# Every second layer has sliding-window attention, starting with the first; gate and up are clamped, the up projection
# is shifted by one, and the gate activation is x·sigmoid(1.702·x).
GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    rules,
    (
        *GROUPED_HEADS,
        YarnRope(default_theta=150000.0),
        SlidingWindow(default=128, listed=True),
        LayerTypes(),
        Const(args={"add_qkv_bias": True, "add_bias_linear": True}, config={"attention_bias": True}),
        NO_QK_NORM,
        Const(args={"softmax_type": "learnable"}),
        Activation(
            args={"swiglu": False, "squared_relu": False, "quick_geglu": True, "glu_linear_offset": 1.0},
            computed={"hidden_act": "silu", "swiglu_alpha": 1.702},
        ),
        Key("swiglu_limit", "activation_func_clamp_value", default=7.0),
        Key("num_local_experts", "num_experts", aliases=("num_experts",)),
        Key("num_experts_per_tok", "moe_router_topk", aliases=("experts_per_token",), default=4),
        *EXPERTS_EVERYWHERE,
    ),
    dialects={torchtitan.TORCHTITAN.name: torchtitan.gpt_oss, **gguf.GPT_OSS},
    judged=(MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE),
    turned_pairs=True,
)
