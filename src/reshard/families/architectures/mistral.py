"""Mistral: Llama with sliding-window attention in every layer."""

from reshard.families.architectures.llama import dense
from reshard.families.config_entries import SlidingWindow
from reshard.families.config_map import GROUPED_HEADS, NO_BIAS, NO_QK_NORM
from reshard.families.dialects import gguf, maxtext, nanotron
from reshard.families.family import MCORE, MEGATRON_BRIDGE, Family
from reshard.families.rope import Rope

MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    dense,
    (*GROUPED_HEADS, Rope(), SlidingWindow(default=4096), NO_BIAS, NO_QK_NORM),
    dialects={**gguf.LLAMA, **maxtext.LLAMA, **nanotron.DIALECTS},
    precedence=1,  # before cwm, which has a list of windowed layers
    judged=(MCORE, MEGATRON_BRIDGE),
)
