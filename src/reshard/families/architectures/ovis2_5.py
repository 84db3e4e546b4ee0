"""Ovis 2.5: Qwen3 with a vision tower and an embedding for its visual tokens."""

from reshard.families.architectures.qwen3 import QWEN3
from reshard.families.family import MCORE_BRIDGE, Family
from reshard.families.outer_model import CarriedTensors, OuterModel

OVIS2_5 = Family(
    "ovis2_5",
    "Ovis2_5",
    QWEN3.rules,
    QWEN3.entries,
    computed_by=MCORE_BRIDGE,
    judged=(MCORE_BRIDGE,),
    within=OuterModel(
        config=("llm_config",),
        hub=(("", "llm."),),
        carried=(
            CarriedTensors("visual_tokenizer.", "visual.visual_tokenizer."),
            CarriedTensors("vte.", "visual.vte."),
        ),
    ),
)
