"""Muse Glimmer: gated attention, norms on both sides of attention and MLP, rope only in sliding-window layers."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families.config_entries import Const, LayerTypes, SlidingWindow
from reshard.families.config_map import GROUPED_HEADS, NO_BIAS, NO_QK_NORM
from reshard.families.dims import Dims
from reshard.families.family import MCORE_BRIDGE, Family
from reshard.families.outer_model import CarriedTensors, OuterModel
from reshard.families.rope import Rope
from reshard.families.rules import Rule, attention, decoder, ends, mlp, same


def rules(dims: Dims) -> Iterator[Rule]:
    """The gate is a separate projection; queries and keys are normalised by norms without weights."""
    yield from ends(dims)
    norms = [
        same(f"{hf}.weight", f"{mcore}.weight", dims.hidden)
        for hf, mcore in (
            ("input_layernorm", "input_layernorm"),
            ("post_attention_layernorm", "post_attention_layernorm"),
            ("pre_feedforward_layernorm", "pre_mlp_layernorm"),
            ("post_feedforward_layernorm", "post_feedforward_layernorm"),
        )
    ]
    width = dims.heads * dims.head_dim
    gate = same("self_attn.gate_proj.weight", "self_attention.gate_proj.weight", width, dims.hidden)
    yield from decoder(dims, [*norms, *attention(dims), gate, *mlp(dims)])


PARTS = ("vision_tower.", "vision_adapter.", "vision_projection.")
MUSE_GLIMMER = Family(
    "muse_glimmer",
    "MuseGlimmerForConditionalGeneration",
    rules,
    (
        *GROUPED_HEADS,
        Rope(),
        SlidingWindow(default=2048, listed=True),
        LayerTypes(full=4, assumed=4),
        Const(args={"apply_layernorm_1p": True}, computed={"hidden_activation": "silu"}),
        NO_BIAS,
        NO_QK_NORM,
    ),
    computed_by=MCORE_BRIDGE,
    within=OuterModel(carried=tuple(CarriedTensors(f"model.{part}", f"visual.{part}") for part in PARTS)),
    judged=(MCORE_BRIDGE,),
)
