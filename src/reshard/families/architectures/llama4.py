"""Llama 4: experts in every second layer or in all, some layers without a rotary embedding, and a vision tower."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from reshard.families.config_entries import (
    Args,
    Config,
    ConfigEntry,
    Const,
    Key,
    Values,
    first,
    moe_layer_freq,
)
from reshard.families.config_map import GROUPED_HEADS, NO_BIAS, NO_QK_NORM
from reshard.families.dialects import torchtitan
from reshard.families.dims import Dims, sparse_layers
from reshard.families.family import MCORE_BRIDGE, Family
from reshard.families.outer_model import CarriedTensors, OuterModel
from reshard.families.rope import Rope, RopeLayers
from reshard.families.rules import (
    Rule,
    attention,
    decoder,
    ends,
    gated_mlp,
    mlp,
    norms,
    renamed,
    same,
    stacked_experts,
)
from reshard.families.transformers_5 import by_transformers


def rules(dims: Dims) -> Iterator[Rule]:
    """Queries and keys are normalised by norms without weights."""
    yield from ends(dims)
    before = [*norms(dims), *attention(dims)]
    shared = gated_mlp(dims, dims.shared_ffn, "mlp.shared_expert", "mlp.shared_experts")
    router = same("mlp.router.weight", "mlp.router.weight", dims.experts, dims.hidden)
    sparse = [*before, router, *shared, *stacked_experts(dims)]
    yield from renamed(decoder(dims, [*before, *mlp(dims)], sparse), {".mlp.": ".feed_forward."})


class MoeLayers(ConfigEntry):
    """`moe_layers` lists the layers with experts; without it, they are every `interleave_moe_layer_step`-th."""

    def to_args(self, config: Config) -> Values:
        layers, step = config.get("num_hidden_layers", 0), first(config, ("interleave_moe_layer_step",), 1)
        sparse = config.get("moe_layers") or range(step - 1, layers, step)
        return {"moe_layer_freq": moe_layer_freq([layer in sparse for layer in range(layers)])}

    def to_config(self, args: Args) -> Values:
        return {
            "moe_layers": list(sparse_layers(first(args, ("moe_layer_freq",), 1), args.get("num_layers", 0)))
        }


class ChunkedAttention(ConfigEntry):
    """Layers with a rotary embedding use chunked attention; those without scale queries at far positions."""

    def notices(self, config: Config) -> Iterator[str]:
        chunk = first(config, ("attention_chunk_size",), 8192)
        if (config.get("max_position_embeddings") or 0) > chunk:
            yield f"attention in chunks of {chunk} tokens; mcore-bridge agrees up to that length, and not beyond"


LLAMA4_TEXT = Family(
    "llama4_text",
    "Llama4ForCausalLM",
    rules,
    (
        *GROUPED_HEADS,
        Rope(default_theta=500000.0),
        RopeLayers(),
        ChunkedAttention(),
        NO_BIAS,
        Const(computed={"attention_bias": False}),
        NO_QK_NORM,
        Key("use_qk_norm", "qk_l2_norm", default=True),
        Key("intermediate_size_mlp", "ffn_hidden_size", default=16384),
        Key("intermediate_size", "moe_ffn_hidden_size", also=("moe_shared_expert_intermediate_size",)),
        Key("num_local_experts", "num_experts", aliases=("num_experts",), default=16),
        Key("num_experts_per_tok", "moe_router_topk", default=1),
        MoeLayers(),
        Const(
            args={
                "rotary_interleaved": True,
                "moe_apply_probs_on_input": True,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": False,
            }
        ),
    ),
    dialects={torchtitan.TORCHTITAN.name: torchtitan.llama4},
    computed_by=MCORE_BRIDGE,
)
LLAMA4 = replace(
    LLAMA4_TEXT,
    name="llama4",
    architecture="Llama4ForConditionalGeneration",
    live=by_transformers("llama4", "Llama4ForConditionalGeneration"),
    within=OuterModel(
        hub=(("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
        carried=(
            CarriedTensors("vision_model.", "visual.vision_model."),
            CarriedTensors("multi_modal_projector.", "visual.multi_modal_projector."),
        ),
    ),
    judged=(MCORE_BRIDGE,),
)
