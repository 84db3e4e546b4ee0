"""Qwen2.5-Omni and Qwen3-Omni: a language model with vision and audio towers, and modules that produce speech."""

from __future__ import annotations

from reshard.families.architectures.qwen2_vl import QWEN2_VL
from reshard.families.architectures.qwen3 import QWEN3_MOE
from reshard.families.architectures.qwen3_vl import QWEN3_VL_MOE
from reshard.families.family import MCORE_BRIDGE, Family
from reshard.families.outer_model import CarriedTensors, OuterModel
from reshard.families.transformers_5 import MemoryNames

IN_MEMORY = (
    ("thinker.model.language_model.", "thinker.model."),
    ("thinker.model.visual.", "thinker.visual."),
    ("thinker.model.audio_tower.", "thinker.audio_tower."),
)
"""Since transformers 5.21. Before, the names were the Hub's."""


def _thinker(vocoder: str) -> OuterModel:
    """mcore-bridge trains the thinker. Neither mcore-bridge nor its checkpoints contain the speech modules."""
    return OuterModel(
        config=("thinker_config", "text_config"),
        hub=(("", "thinker."),),
        carried=(
            CarriedTensors("thinker.visual.", "visual.visual."),
            CarriedTensors("thinker.audio_tower.", "visual.audio_tower."),
            CarriedTensors("talker.", "talker.", optional=True),
            CarriedTensors(vocoder, vocoder, optional=True),
        ),
    )


QWEN2_5_OMNI = Family(
    "qwen2_5_omni",
    "Qwen2_5OmniForConditionalGeneration",
    QWEN2_VL.rules,
    QWEN2_VL.entries,
    live=MemoryNames(None, begins=IN_MEMORY),
    computed_by=MCORE_BRIDGE,
    judged=(MCORE_BRIDGE,),
    within=_thinker("token2wav."),
)
QWEN3_OMNI_MOE = Family(
    "qwen3_omni_moe",
    "Qwen3OmniMoeForConditionalGeneration",
    QWEN3_MOE.rules,  # the Hub stores one tensor per expert
    QWEN3_VL_MOE.entries,
    live=MemoryNames(begins=IN_MEMORY),
    computed_by=MCORE_BRIDGE,
    judged=(MCORE_BRIDGE,),
    within=_thinker("code2wav."),
)
