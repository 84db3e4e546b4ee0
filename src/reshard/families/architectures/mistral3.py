"""Ministral 3: Mistral with a vision tower, and queries scaled by position beyond the original context."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families.architectures.llama import dense
from reshard.families.config_entries import Config, SlidingWindow, Values
from reshard.families.config_map import GROUPED_HEADS, NO_BIAS, NO_QK_NORM
from reshard.families.family import MEGATRON_BRIDGE, Family
from reshard.families.outer_model import CarriedTensors, OuterModel
from reshard.families.rope import RotaryEmbedding, rope_parameters, rotary_base
from reshard.families.transformers_5 import by_transformers


class KeptRope(RotaryEmbedding):
    """YaRN and the query scale, which Megatron-Bridge reads from config.json: Megatron-LM has no arguments for them."""

    def to_args(self, config: Config) -> Values:
        return {
            "position_embedding_type": "yarn",
            "use_rotary_position_embeddings": False,
            "rotary_base": rotary_base(rope_parameters(config), 1000000.0),
        }

    def differs(self, config: Config) -> Iterator[tuple[str, str]]:
        if "llama_4_scaling_beta" not in rope_parameters(config):  # Mistral Small 3
            yield (
                "rope_parameters",
                "no llama_4_scaling_beta; Megatron-Bridge's model cannot be built without",
            )


MISTRAL3 = Family(
    "mistral3",
    "Mistral3ForConditionalGeneration",
    dense,
    (*GROUPED_HEADS, KeptRope(), SlidingWindow(default=None), NO_BIAS, NO_QK_NORM),
    computed_by=MEGATRON_BRIDGE,
    live=by_transformers("mistral3", "Mistral3ForConditionalGeneration"),
    within=OuterModel(
        hub=(("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
        carried=(
            CarriedTensors("vision_tower.", "vision_tower."),
            CarriedTensors("multi_modal_projector.", "multi_modal_projector."),
        ),
    ),
    judged=(MEGATRON_BRIDGE,),
)
