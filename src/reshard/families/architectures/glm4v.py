"""GLM-4.1V and GLM-4.5V: GLM-4 and GLM-4.5 with a vision tower."""

from __future__ import annotations

from dataclasses import replace

from reshard.families.architectures import glm4, glm4_moe
from reshard.families.config_entries import ConfigEntry, Const, Key
from reshard.families.config_map import DEEPSEEK_EXPERTS, GROUPED_HEADS, MTP, NO_QK_NORM, SIGMOID_ROUTER
from reshard.families.family import MCORE_BRIDGE, MEGATRON_BRIDGE, Family
from reshard.families.outer_model import CarriedTensors, OuterModel
from reshard.families.rope import MultimodalRope
from reshard.families.transformers_5 import MemoryNames

ATTENTION: tuple[ConfigEntry, ...] = (
    *GROUPED_HEADS,
    MultimodalRope(fraction=0.5),
    Key("attention_bias", "add_qkv_bias", default=True),
    Const(args={"add_bias_linear": False}),
)
VISION = CarriedTensors("model.visual.", "visual.visual.")

GLM4V = Family(
    "glm4v",
    "Glm4vForConditionalGeneration",
    glm4.rules,
    (*ATTENTION, Const(args={"rotary_interleaved": True}), NO_QK_NORM),
    computed_by=MCORE_BRIDGE,
    within=OuterModel(carried=(VISION,)),
    judged=(MCORE_BRIDGE,),
)
GLM4V_MOE = Family(
    "glm4v_moe",
    "Glm4vMoeForConditionalGeneration",
    glm4_moe.rules,
    (
        *ATTENTION,
        Key("use_qk_norm", "qk_layernorm", default=False),
        *DEEPSEEK_EXPERTS,
        *SIGMOID_ROUTER,
        MTP,
    ),
    live=MemoryNames(),
    computed_by=MCORE_BRIDGE,
    within=OuterModel(carried=(replace(VISION, others={MEGATRON_BRIDGE: "visual."}),)),
    judged=(MCORE_BRIDGE, MEGATRON_BRIDGE),
)
