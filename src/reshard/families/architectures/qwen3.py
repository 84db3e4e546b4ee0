"""Qwen3, dense and with experts: Qwen2 with query and key norms instead of biases."""

from reshard.families.architectures.llama import dense
from reshard.families.architectures.qwen2 import sparse
from reshard.families.config_entries import Const, FullAttention
from reshard.families.config_map import GROUPED_HEADS, NO_BIAS, QK_NORM, QWEN_EXPERTS
from reshard.families.dialects import gguf, maxtext, torchtitan
from reshard.families.family import MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE, Family
from reshard.families.rope import Rope
from reshard.families.transformers_5 import MemoryNames

DIALECTS = {torchtitan.TORCHTITAN.name: torchtitan.qwen3, **gguf.QWEN, **maxtext.QWEN}
UNBIASED = (NO_BIAS, Const(config={"attention_bias": False}), QK_NORM)

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    dense,
    (*GROUPED_HEADS, Rope(), FullAttention(), *UNBIASED),
    dialects=DIALECTS,
    precedence=1,
    judged=(MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE),
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    sparse,
    (*GROUPED_HEADS, Rope(), FullAttention(late=False), *UNBIASED, *QWEN_EXPERTS),
    dialects=DIALECTS,
    live=MemoryNames(),
    precedence=1,
    judged=(MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE),
)
