"""Qwen3-VL: Qwen3 with a vision tower."""

from __future__ import annotations

from reshard.families.architectures.llama import dense
from reshard.families.architectures.qwen3 import UNBIASED
from reshard.families.config import GROUPED_HEADS
from reshard.families.family import MCORE_BRIDGE, MEGATRON_BRIDGE, Family
from reshard.families.rope import MultimodalRope
from reshard.families.within import Carried, Within

QWEN3_VL = Family(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    dense,
    (*GROUPED_HEADS, MultimodalRope(), *UNBIASED),
    computed_by=MCORE_BRIDGE,
    within=Within(carried=(Carried("model.visual.", "visual.visual.", {MEGATRON_BRIDGE: "vision_model."}),)),
    judged=(MCORE_BRIDGE,),
)
