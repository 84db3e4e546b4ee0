"""Qwen3-VL, dense and with experts: Qwen3 with a vision tower."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families.architectures.llama import dense
from reshard.families.architectures.qwen3 import UNBIASED
from reshard.families.config_map import GROUPED_HEADS, QWEN_EXPERTS
from reshard.families.dims import Dims
from reshard.families.family import MCORE_BRIDGE, MEGATRON_BRIDGE, Family
from reshard.families.outer_model import CarriedTensors, OuterModel
from reshard.families.rope import MultimodalRope
from reshard.families.rules import Rule, attention, decoder, ends, mlp, norms, same, stacked_experts
from reshard.families.towers import Tower
from reshard.families.transformers_5 import MemoryNames


def sparse(dims: Dims) -> Iterator[Rule]:
    """The Hub stacks the experts of a layer, [inputs, outputs] each."""
    yield from ends(dims)
    block = [*norms(dims), *attention(dims)]
    router = same("mlp.gate.weight", "mlp.router.weight", dims.experts, dims.hidden)
    yield from decoder(dims, [*block, *mlp(dims)], [*block, router, *stacked_experts(dims)])


OF_MEGATRON = Tower(
    (
        ("blocks.", "decoder.layers."),
        ("deepstack_merger_list.", "decoder.deepstack_merger_list."),
        (".attn.qkv.", ".self_attention.linear_qkv."),
        (".attn.proj.", ".self_attention.linear_proj."),
        (".norm1.", ".self_attention.linear_qkv.layer_norm_"),
        (".norm2.", ".mlp.linear_fc1.layer_norm_"),
        (".norm.", ".patch_norm."),
    ),
    fused="linear_qkv",
)
"""The tower that Megatron-Bridge builds of Megatron's own modules; its first releases had that of transformers."""
TOWER = OuterModel(
    carried=(
        CarriedTensors(
            "model.visual.",
            "visual.visual.",
            {MEGATRON_BRIDGE: "vision_model."},
            towers={MEGATRON_BRIDGE: OF_MEGATRON},
        ),
    )
)
QWEN3_VL = Family(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    dense,
    (*GROUPED_HEADS, MultimodalRope(), *UNBIASED),
    computed_by=MCORE_BRIDGE,
    within=TOWER,
    judged=(MCORE_BRIDGE, MEGATRON_BRIDGE),
)
QWEN3_VL_MOE = Family(
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    sparse,
    (*GROUPED_HEADS, MultimodalRope(), *UNBIASED, *QWEN_EXPERTS),
    live=MemoryNames(experts=None, transposed="mlp.experts"),
    computed_by=MCORE_BRIDGE,
    within=TOWER,
    judged=(MCORE_BRIDGE, MEGATRON_BRIDGE),
)
