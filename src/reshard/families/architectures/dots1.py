"""dots1: the layers of GLM-4.5 with rope over the full head dimension, and without MTP layers."""

from __future__ import annotations

from reshard.families.architectures.glm4_moe import rules
from reshard.families.config import DEEPSEEK_EXPERTS, DERIVED_HEADS, NO_BIAS, QK_NORM, SIGMOID_ROUTER
from reshard.families.entries import Const, FullAttention
from reshard.families.family import MCORE, MCORE_BRIDGE, Family
from reshard.families.live import Live
from reshard.families.rope import Rope

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
    live=Live(),
    precedence=2,  # above GLM-4.5: if nothing names the family, rope over the full head dimension means dots1
    judged=(MCORE, MCORE_BRIDGE),
)
