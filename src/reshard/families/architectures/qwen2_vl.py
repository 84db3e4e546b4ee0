"""Qwen2-VL and Qwen2.5-VL: Qwen2 with a vision tower."""

from dataclasses import replace

from reshard.families.architectures.llama import dense
from reshard.families.config_entries import FullAttention
from reshard.families.config_map import DERIVED_HEADS, NO_QK_NORM, QKV_BIAS
from reshard.families.family import MCORE_BRIDGE, MEGATRON_BRIDGE, Family
from reshard.families.outer_model import CarriedTensors, OuterModel
from reshard.families.rope import MultimodalRope
from reshard.families.transformers_5 import MemoryNames

QWEN2_VL = Family(
    "qwen2_vl",
    "Qwen2VLForConditionalGeneration",
    dense,
    (*DERIVED_HEADS, MultimodalRope(), FullAttention(), QKV_BIAS, NO_QK_NORM),
    computed_by=MCORE_BRIDGE,
    within=OuterModel(hub=(), carried=(CarriedTensors("visual.", "visual.visual."),)),
    live=MemoryNames(None, begins=(("model.language_model.", "model."), ("model.visual.", "visual."))),
    judged=(MCORE_BRIDGE,),
)
QWEN2_5_VL = replace(
    QWEN2_VL,
    name="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    within=OuterModel(
        hub=(), carried=(CarriedTensors("visual.", "visual.visual.", {MEGATRON_BRIDGE: "visual."}),)
    ),
    judged=(MCORE_BRIDGE, MEGATRON_BRIDGE),
)
