"""DeepSeek-V2: latent attention, leading dense layers, shared experts, a softmax router."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families import config
from reshard.families.family import Family
from reshard.families.rules import Dims, Rule, decoder, ends, latent_attention, mlp, moe, norms


def rules(d: Dims) -> Iterator[Rule]:
    """DeepSeek-V3's layers, without a router bias and without MTP layers."""
    yield from ends(d)
    block = [*norms(d), *latent_attention(d)]
    yield from decoder(d, [*block, *mlp(d)], [*block, *moe(d)])


DEEPSEEK_V2 = Family("deepseek_v2", "DeepseekV2ForCausalLM", config.DEEPSEEK_V2, rules)
