"""LLaVA-OneVision 1.5: Qwen3 with a vision tower. ms-swift calls it llava_onevision1_5."""

from reshard.families.architectures.qwen3 import QWEN3
from reshard.families.family import MCORE_BRIDGE, Family
from reshard.families.outer_model import CarriedTensors, OuterModel

LLAVA_ONEVISION1_5 = Family(
    "llavaonevision1_5",
    "LLaVAOneVision1_5_ForConditionalGeneration",
    QWEN3.rules,
    QWEN3.entries,
    computed_by=MCORE_BRIDGE,
    judged=(MCORE_BRIDGE,),
    within=OuterModel(hub=(), carried=(CarriedTensors("visual.", "visual.visual."),)),
)
