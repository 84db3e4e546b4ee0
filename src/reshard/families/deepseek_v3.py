"""DeepSeek-V3: latent attention, leading dense layers, shared experts, a biased sigmoid router, MTP layers."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families import config
from reshard.families.family import Family
from reshard.families.rules import (
    Dims,
    Rule,
    decoder,
    ends,
    latent_attention,
    mlp,
    moe,
    multi_token_prediction,
    norms,
)


def rules(d: Dims) -> Iterator[Rule]:
    """MTP layers are built like the sparse layers before them."""
    yield from ends(d)
    block = [*norms(d), *latent_attention(d)]
    sparse = [*block, *moe(d)]
    yield from decoder(d, [*block, *mlp(d)], sparse)
    yield from multi_token_prediction(d, sparse)


DEEPSEEK_V3 = Family("deepseek_v3", "DeepseekV3ForCausalLM", config.DEEPSEEK_V3, rules)
