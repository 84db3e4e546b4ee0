"""CWM: Llama with sliding-window attention in three of four layers."""

from __future__ import annotations

from reshard.families.architectures.llama import dense
from reshard.families.config_entries import Config, Const, LayerTypes, SlidingWindow, Values
from reshard.families.config_map import GROUPED_HEADS, NO_BIAS, NO_QK_NORM
from reshard.families.family import MCORE, Family
from reshard.families.rope import Rope


class LeadingFullLayers(LayerTypes):
    """Without a config entry, every fourth layer has full attention, starting with the first."""

    def to_args(self, config: Config) -> Values:
        if config.get("layer_types"):
            return super().to_args(config)
        return {"window_attn_skip_freq": [int(i % 4 > 0) for i in range(config.get("num_hidden_layers", 0))]}


CWM = Family(
    "cwm",
    "CwmForCausalLM",
    dense,
    (
        *GROUPED_HEADS,
        Rope(default_theta=1000000.0, assumed={"rope_type": "llama3", "factor": 16.0}),
        SlidingWindow(default=8192, listed=True),
        LeadingFullLayers(),
        NO_BIAS,
        Const(config={"mlp_bias": False}),
        NO_QK_NORM,
    ),
    judged=(MCORE,),
)
