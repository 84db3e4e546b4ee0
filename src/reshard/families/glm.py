"""GLM-4.5 and its successors: DeepSeek-V3's mixture of experts behind grouped-query attention."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families import config
from reshard.families.family import Family
from reshard.families.rules import (
    Dims,
    Rule,
    attention,
    decoder,
    ends,
    mlp,
    moe,
    multi_token_prediction,
    norms,
)


def rules(d: Dims) -> Iterator[Rule]:
    """MTP layers are built like the sparse layers before them; query and key norms as the sizes say."""
    yield from ends(d)
    block = [*norms(d), *attention(d)]
    sparse = [*block, *moe(d)]
    yield from decoder(d, [*block, *mlp(d)], sparse)
    yield from multi_token_prediction(d, sparse)


GLM4_MOE = Family("glm4_moe", "Glm4MoeForCausalLM", config.GLM4_MOE, rules)
