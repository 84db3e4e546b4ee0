"""Ernie 4.5: Llama with interleaved rope, which rotates neighbouring elements of a head instead of its two halves."""

from reshard.families.architectures.llama import dense
from reshard.families.config_entries import Const, Key
from reshard.families.config_map import GROUPED_HEADS, NO_QK_NORM, TIED
from reshard.families.family import MCORE, MCORE_BRIDGE, Family
from reshard.families.rope import Rope

ERNIE4_5 = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    dense,
    (
        *GROUPED_HEADS,
        Rope(default_theta=500000.0),
        Const(args={"rotary_interleaved": True}),
        TIED,
        Key("use_bias", "add_bias_linear", also=("add_qkv_bias",), default=False, assumed=False),
        NO_QK_NORM,
    ),
    judged=(MCORE, MCORE_BRIDGE),
)
