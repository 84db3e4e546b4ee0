"""Kimi-VL and Kimi-K2.5: DeepSeek-V3 with a vision tower."""

from __future__ import annotations

from dataclasses import replace

from reshard.families.architectures.deepseek_v3 import DEEPSEEK_V3
from reshard.families.family import MCORE_BRIDGE, Family
from reshard.families.outer_model import CarriedTensors, OuterModel
from reshard.families.transformers_5 import by_transformers


def with_projector(name: str, architecture: str, projector: str) -> Family:
    """A Kimi model with this projector name; its config names the language model, deepseek_v3 or kimi_k2."""
    parts = (f"{part}." for part in ("vision_tower", projector))
    carried = tuple(CarriedTensors(part, f"visual.{part}") for part in parts)
    return replace(
        DEEPSEEK_V3,
        name=name,
        architecture=architecture,
        live=None,
        aliases={},
        precedence=0,
        computed_by=MCORE_BRIDGE,
        within=OuterModel(hub=(("", "language_model."),), carried=carried),
        judged=(MCORE_BRIDGE,),
    )


KIMI_VL = with_projector("kimi_vl", "KimiVLForConditionalGeneration", "multi_modal_projector")
KIMI_K25 = replace(
    with_projector("kimi_k25", "KimiK25ForConditionalGeneration", "mm_projector"),
    live=by_transformers("kimi_k25", "Kimi_K25ForConditionalGeneration"),
)
