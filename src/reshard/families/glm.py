"""GLM-4.5 and its successors, and dots1: DeepSeek-V3's mixture of experts behind grouped-query attention."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families import config
from reshard.families.deepseek_v3 import layers
from reshard.families.family import Family
from reshard.families.rules import Dims, Rule, attention


def rules(d: Dims) -> Iterator[Rule]:
    """Query and key norms as the sizes say."""
    return layers(d, attention(d))


GLM4_MOE = Family("glm4_moe", "Glm4MoeForCausalLM", config.GLM4_MOE, rules)
DOTS1 = Family("dots1", "Dots1ForCausalLM", config.DOTS1, rules)
