"""Qwen3.5, dense and with experts: Qwen3-Next's layers under other names, with a vision tower. And MiniCPM-V 4.6.

On the Hub, queries, keys and values of a delta net are one projection, its other inputs are separate, and experts are
stacked.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from reshard.algebra.views import View, concat
from reshard.families.architectures.qwen3_next import DELTA_NET, SHARED_EXPERT, Parts, hybrid
from reshard.families.architectures.qwen3_vl import TOWER
from reshard.families.config_entries import Const, Key
from reshard.families.config_map import MTP
from reshard.families.family import MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE, Family
from reshard.families.outer_model import CarriedTensors, OuterModel
from reshard.families.rope import MultimodalRope, Rope
from reshard.families.rules import Block, Rule
from reshard.families.transformers_5 import ExpertNames, MemoryNames


def by_kind(parts: Parts) -> Block:
    """Queries, then keys, then values by rows, each in the order of heads; the other projections are separate."""

    def all_heads(*names: str) -> View:
        return concat([parts[name].merge(0) for name in names])

    return [
        Rule("linear_attn.in_proj_qkv.weight", all_heads("query", "key", "value")),
        Rule("linear_attn.in_proj_z.weight", all_heads("z")),
        Rule("linear_attn.in_proj_b.weight", all_heads("beta")),
        Rule("linear_attn.in_proj_a.weight", all_heads("alpha")),
    ]


by_kind_rules, by_head = (partial(hybrid, by_head=each, on_the_hub=by_kind) for each in (False, True))
PREDICTED = Key(
    "mtp_num_hidden_layers", "mtp_num_layers", aliases=("num_nextn_predict_layers",), default=0, none=0
)
TEXT = (*(entry for entry in DELTA_NET if entry != MTP and not isinstance(entry, Rope)), PREDICTED)
PLAIN, SEES = (*TEXT, Rope(fraction=0.25)), (*TEXT, MultimodalRope(fraction=0.25))
# Every layer has experts, whose scores are normalised over the chosen ones. No config key states either.
EXPERTS = (
    *SHARED_EXPERT,
    Key("moe_intermediate_size", "moe_ffn_hidden_size", also=("ffn_hidden_size",)),
    Const(args={"moe_router_pre_softmax": False, "moe_layer_freq": 1}),
)
# transformers saves one tensor per expert; the Hub's Qwen3.6 stacks those of the MTP layer too.
STACKED = MemoryNames(ExpertNames("mtp.layers.0.mlp.experts"), stacked="mlp.experts")

QWEN3_5 = Family(
    "qwen3_5",
    "Qwen3_5ForConditionalGeneration",
    by_head,
    SEES,
    dialects={MEGATRON_BRIDGE: by_kind_rules},
    computed_by=MCORE_BRIDGE,
    within=TOWER,
    judged=(MCORE_BRIDGE, MEGATRON_BRIDGE),
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration",
    partial(by_head, stacked=True),
    (*SEES, *EXPERTS),
    dialects={MEGATRON_BRIDGE: partial(by_kind_rules, stacked=True)},
    live=STACKED,
    computed_by=MCORE_BRIDGE,
    within=TOWER,
    judged=(MCORE_BRIDGE, MEGATRON_BRIDGE),
)
MINICPM_V = replace(
    QWEN3_5,
    name="minicpmv4_6",
    architecture="MiniCPMV4_6ForConditionalGeneration",
    within=OuterModel(
        carried=(
            CarriedTensors("model.vision_tower.", "visual.vision_tower."),
            CarriedTensors("model.merger.", "visual.merger."),
        )
    ),
    dialects={},
    judged=(MCORE_BRIDGE,),
)
QWEN3_5_TEXT = Family(
    "qwen3_5_text", "Qwen3_5ForCausalLM", by_kind_rules, PLAIN, judged=(MCORE, MEGATRON_BRIDGE)
)
