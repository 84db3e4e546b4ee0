"""Gemma, Gemma 2 and Gemma 3: zero-centred norms, embeddings scaled by the square root of the hidden size.

Megatron-Bridge computes them; it names the norms after attention and MLP after its own row-parallel linear layer.
Source: `models/gemma` of Megatron-Bridge 0.3.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from reshard.families.architectures.llama import dense
from reshard.families.config_entries import (
    Activation,
    Args,
    Config,
    ConfigEntry,
    Const,
    Key,
    LayerTypes,
    SlidingWindow,
    Values,
    first,
)
from reshard.families.config_map import GROUPED_HEADS, NO_BIAS, NO_QK_NORM, QK_NORM, TIED
from reshard.families.dialects import gguf, maxtext
from reshard.families.dims import Dims
from reshard.families.family import MEGATRON_BRIDGE, Family
from reshard.families.outer_model import CarriedTensors, OuterModel
from reshard.families.rope import Rope, RotaryEmbedding, rope_parameters, rotary_base
from reshard.families.rules import Rule, attention, decoder, ends, mlp, same
from reshard.families.transformers_5 import by_transformers


def sandwich(dims: Dims) -> Iterator[Rule]:
    """Both the inputs and the outputs of attention and MLP are normalised."""
    yield from ends(dims)
    norms = [
        same("input_layernorm.weight", "input_layernorm.weight", dims.hidden),
        same(
            "post_attention_layernorm.weight", "self_attention.linear_proj.post_layernorm.weight", dims.hidden
        ),
        same("pre_feedforward_layernorm.weight", "pre_mlp_layernorm.weight", dims.hidden),
        same("post_feedforward_layernorm.weight", "mlp.linear_fc2.post_layernorm.weight", dims.hidden),
    ]
    yield from decoder(dims, [*norms, *attention(dims), *mlp(dims)])


LOCAL, GLOBAL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class TwoRopes(RotaryEmbedding):
    """Gemma 3: one rope base for windowed layers, another for full attention, whose positions may be scaled down.

    transformers 4 spells it `rope_local_base_freq`, `rope_theta` and `rope_scaling`; Megatron-Bridge has two numbers in
    `rotary_base`.
    """

    def spellings(self) -> tuple[str, ...]:
        return (*super().spellings(), "rope_local_base_freq")

    def to_args(self, config: Config) -> Values:
        rope = rope_parameters(config)
        local, whole = rope.get(LOCAL), rope.get(GLOBAL, rope)
        local = local or {"rope_theta": config.get("rope_local_base_freq") or 10000.0}
        bases = (rotary_base(local, 10000.0), rotary_base(whole, 1000000.0))
        return {"rotary_base": bases, "rope_scaling_factor": first(whole, ("factor",), 1.0)}

    def to_config(self, args: Args) -> Values:
        local, whole = map(float, args["rotary_base"])
        factor = first(args, ("rope_scaling_factor",), 1.0)
        scaling = {"rope_type": "linear", "factor": factor} if factor != 1 else {"rope_type": "default"}
        return {
            "rope_parameters": {
                LOCAL: {"rope_type": "default", "rope_theta": local},
                GLOBAL: {"rope_theta": whole, **scaling},
            },
            "rope_theta": whole,
            "rope_local_base_freq": local,
            "rope_scaling": scaling if factor != 1 else None,
        }

    def differs(self, config: Config) -> Iterator[tuple[str, str]]:
        rope = rope_parameters(config)
        kind = rope.get(GLOBAL, rope).get("rope_type", "default")
        if kind not in ("default", "linear"):
            yield "rope_parameters", f"rope_type is {kind!r}; Megatron-Bridge divides positions, or does not"


class QueryScale(ConfigEntry):
    """Gemma 3's `query_pre_attn_scalar`; Megatron-Bridge's `softmax_scale` is one over its square root."""

    def to_args(self, config: Config) -> Values:
        return {"softmax_scale": first(config, ("query_pre_attn_scalar",), 256) ** -0.5}

    def to_config(self, args: Args) -> Values:
        scale = args.get("softmax_scale")
        return {"query_pre_attn_scalar": round(scale**-2)} if scale else {}


GELU = {"swiglu": False, "squared_relu": False, "gated_linear_unit": True}
TANH = "gelu_pytorch_tanh"
COMMON = (
    *GROUPED_HEADS,
    Const(args={"apply_layernorm_1p": True}),
    NO_BIAS,
    Const(computed={"attention_bias": False}),
    TIED,
)

GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    dense,
    # The Hub's Gemma config says "gelu"; it was trained with the tanh approximation, which transformers computes.
    (*COMMON, Rope(), Activation(GELU, {"hidden_act": TANH}), NO_QK_NORM),
    dialects=gguf.GEMMA,
    computed_by=MEGATRON_BRIDGE,
    judged=(MEGATRON_BRIDGE,),
)
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    sandwich,
    (
        *COMMON,
        Rope(),
        Activation(GELU, computed={"hidden_activation": TANH}),
        SlidingWindow(default=4096, listed=True),
        LayerTypes(assumed=2),
        Key("query_pre_attn_scalar", "query_pre_attn_scalar", default=256),
        Key("attn_logit_softcapping", "attn_logit_softcapping", default=50.0),
        Key("final_logit_softcapping", "final_logit_softcapping", default=30.0),
        NO_QK_NORM,
    ),
    dialects={**gguf.SANDWICH, **maxtext.GEMMA2},
    computed_by=MEGATRON_BRIDGE,
    judged=(MEGATRON_BRIDGE,),
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    sandwich,
    (
        *COMMON,
        TwoRopes(),
        Activation(GELU, computed={"hidden_activation": TANH}),
        SlidingWindow(default=4096, listed=True),
        LayerTypes(full=6, assumed=6),
        QueryScale(),
        QK_NORM,
    ),
    dialects={**gguf.SANDWICH, **maxtext.GEMMA3},
    computed_by=MEGATRON_BRIDGE,
    judged=(MEGATRON_BRIDGE,),
)
PROJECTOR = "multi_modal_projector."
GEMMA3_VISION = replace(
    GEMMA3,
    name="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    live=by_transformers("gemma3", "Gemma3ForConditionalGeneration"),
    within=OuterModel(
        hub=(("", "language_model."),),
        carried=(
            # Transformers 5, of whose modules the tower is, has no `vision_model`.
            CarriedTensors(
                "vision_tower.vision_model.", "vision_tower.", older=("vision_tower.vision_model.",)
            ),
            CarriedTensors(f"{PROJECTOR}mm_soft_emb_norm.", f"{PROJECTOR}mm_soft_embed_norm."),
            CarriedTensors(
                f"{PROJECTOR}mm_input_projection_weight", f"{PROJECTOR}proj.weight", transposed=True
            ),
        ),
    ),
)
