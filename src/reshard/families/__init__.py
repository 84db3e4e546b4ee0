"""Model architectures: one declaration each, used in both directions."""

from __future__ import annotations

from typing import Any

from reshard.families.baichuan import BAICHUAN
from reshard.families.deepseek_v2 import DEEPSEEK_V2
from reshard.families.deepseek_v3 import DEEPSEEK_V3
from reshard.families.family import Family
from reshard.families.glm import DOTS1, GLM4_MOE
from reshard.families.gpt_oss import GPT_OSS
from reshard.families.internlm import INTERNLM, INTERNLM2, INTERNLM_MOE
from reshard.families.llama import CWM, ERNIE4_5, INTERNLM3, LLAMA, MISTRAL, SMOLLM3
from reshard.families.mimo import MIMO
from reshard.families.mixtral import MIXTRAL
from reshard.families.phi3 import PHI3
from reshard.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        QWEN2,  # before Llama: where nothing names the family, a bias on q, k and v alone means Qwen2
        MIMO,
        LLAMA,
        MISTRAL,
        MIXTRAL,
        QWEN2_MOE,
        QWEN3,
        QWEN3_MOE,
        INTERNLM,
        INTERNLM2,
        INTERNLM_MOE,
        INTERNLM3,
        DEEPSEEK_V2,  # before DeepSeek-V3: where nothing names the family, a router without a bias means V2
        DEEPSEEK_V3,
        DOTS1,  # before GLM-4.5: where nothing names the family, a rope over whole heads means dots1
        GLM4_MOE,
        GPT_OSS,
        ERNIE4_5,
        SMOLLM3,
        CWM,
        PHI3,
        BAICHUAN,
    )
}
"""By the `model_type` of config.json."""


def declared(model_type: Any) -> Family | None:
    """The family that `model_type` in a config names, by its name or an alias; None if nobody declared it."""
    if not isinstance(model_type, str):
        return None
    alias = next((family for family in FAMILIES.values() if model_type in family.aliases), None)
    return FAMILIES.get(model_type, alias)


__all__ = ["FAMILIES", "Family", "declared"]
