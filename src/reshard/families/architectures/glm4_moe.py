"""GLM-4.5 and its successors: grouped-query attention with DeepSeek-V3's mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families.architectures.deepseek_v3 import layers
from reshard.families.config_entries import Const, Key
from reshard.families.config_map import DEEPSEEK_EXPERTS, GROUPED_HEADS, MTP, SIGMOID_ROUTER
from reshard.families.dims import Dims
from reshard.families.family import MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE, Family
from reshard.families.rope import Rope
from reshard.families.rules import Rule, attention
from reshard.families.transformers_5 import MemoryNames


def rules(dims: Dims) -> Iterator[Rule]:
    """Query and key norms depend on the sizes."""
    return layers(dims, attention(dims))


GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    rules,
    (
        *GROUPED_HEADS,
        Rope(fraction=0.5),
        Key("attention_bias", "add_qkv_bias", default=False),
        Const(args={"add_bias_linear": False}),
        Key("use_qk_norm", "qk_layernorm", default=False),
        *DEEPSEEK_EXPERTS,
        *SIGMOID_ROUTER,
        MTP,
    ),
    live=MemoryNames(),
    precedence=1,
    judged=(MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE),
)
