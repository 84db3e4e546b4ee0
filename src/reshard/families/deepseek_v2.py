"""DeepSeek-V2: DeepSeek-V3's layers with a softmax router, without a router bias and without MTP layers."""

from __future__ import annotations

from reshard.families import config
from reshard.families.deepseek_v3 import rules
from reshard.families.family import Family

DEEPSEEK_V2 = Family("deepseek_v2", "DeepseekV2ForCausalLM", config.DEEPSEEK_V2, rules)
