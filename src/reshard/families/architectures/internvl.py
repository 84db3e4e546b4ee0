"""InternVL, in the spellings of OpenGVLab and transformers: a vision tower, and one of several language models."""

from dataclasses import replace

from reshard.families.architectures.qwen2 import QWEN2
from reshard.families.architectures.qwen3 import QWEN3, QWEN3_MOE
from reshard.families.family import MCORE_BRIDGE, Family
from reshard.families.outer_model import CarriedTensors, OuterModel
from reshard.families.transformers_5 import MemoryNames

BELOW = (("", "language_model."),)
IN_MEMORY = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
)

INTERNVL = Family(
    "internvl",
    "InternVLForConditionalGeneration",
    QWEN3.rules,
    QWEN3.entries,
    live=MemoryNames(begins=IN_MEMORY),
    languages=(QWEN2, QWEN3, QWEN3_MOE),
    computed_by=MCORE_BRIDGE,
    judged=(MCORE_BRIDGE,),
    within=OuterModel(
        hub=BELOW,
        carried=(
            CarriedTensors("vision_tower.", "visual.vision_tower."),
            CarriedTensors("multi_modal_projector.", "visual.multi_modal_projector."),
        ),
    ),
)
INTERNVL_CHAT = replace(
    INTERNVL,
    name="internvl_chat",
    architecture="InternVLChatModel",
    live=MemoryNames(),
    within=OuterModel(
        config=("llm_config",),
        hub=BELOW,
        carried=(
            CarriedTensors("vision_model.", "visual.vision_model."),
            CarriedTensors("mlp1.", "visual.mlp1."),
        ),
    ),
)
