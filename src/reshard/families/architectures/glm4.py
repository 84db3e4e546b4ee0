"""GLM-4-0414: the outputs of attention and MLP are normalised, too."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families.config_entries import Const, Key
from reshard.families.config_map import GROUPED_HEADS, NO_QK_NORM
from reshard.families.dims import Dims
from reshard.families.family import MCORE_BRIDGE, Family
from reshard.families.rope import Rope
from reshard.families.rules import Rule, attention, decoder, ends, fused_mlp, norms, same


def rules(dims: Dims) -> Iterator[Rule]:
    """The two additional norms have the names of mcore-bridge's modules."""
    yield from ends(dims)
    after = [
        same(
            "post_self_attn_layernorm.weight", "self_attention.post_self_attn_layernorm.weight", dims.hidden
        ),
        same("post_mlp_layernorm.weight", "mlp.post_mlp_layernorm.weight", dims.hidden),
    ]
    yield from decoder(dims, [*norms(dims), *attention(dims), *fused_mlp(dims), *after])


# Interleaved rope: neighbouring elements of a head are rotated.
GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    rules,
    (
        *GROUPED_HEADS,
        Rope(fraction=0.5),
        Const(args={"rotary_interleaved": True, "add_bias_linear": False}),
        Key("attention_bias", "add_qkv_bias", default=False),
        NO_QK_NORM,
    ),
    computed_by=MCORE_BRIDGE,
    judged=(MCORE_BRIDGE,),
)
