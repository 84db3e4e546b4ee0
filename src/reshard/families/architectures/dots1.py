"""dots1: the layers of GLM-4.5 with rope over the full head dimension, and without MTP layers."""

from reshard.families.architectures.glm4_moe import rules
from reshard.families.config_entries import Const, FullAttention
from reshard.families.config_map import DEEPSEEK_EXPERTS, DERIVED_HEADS, NO_BIAS, QK_NORM, SIGMOID_ROUTER
from reshard.families.family import MCORE, MCORE_BRIDGE, Family
from reshard.families.rope import Rope
from reshard.families.transformers_5 import MemoryNames

DOTS1 = Family(
    "dots1",
    "Dots1ForCausalLM",
    rules,
    (
        *DERIVED_HEADS,
        Rope(),
        FullAttention(switched=False),
        NO_BIAS,
        Const(config={"attention_bias": False}),
        QK_NORM,
        *DEEPSEEK_EXPERTS,
        *SIGMOID_ROUTER,
    ),
    live=MemoryNames(),
    precedence=2,  # above GLM-4.5: if nothing names the family, rope over the full head dimension means dots1
    judged=(MCORE, MCORE_BRIDGE),
)
