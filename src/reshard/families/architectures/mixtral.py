"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families.config_entries import Key, SlidingWindow
from reshard.families.config_map import EXPERTS_EVERYWHERE, GROUPED_HEADS, NO_BIAS, NO_QK_NORM
from reshard.families.dialects import gguf, maxtext
from reshard.families.dims import Dims
from reshard.families.family import MCORE, Family
from reshard.families.rope import Rope
from reshard.families.rules import Rule, attention, decoder, ends, moe, norms
from reshard.families.transformers_5 import BLOCK_SPARSE_NAMES


def rules(dims: Dims) -> Iterator[Rule]:
    """The Hub names gate, up and down w1, w3 and w2."""
    yield from ends(dims)
    experts = moe(dims, hf="block_sparse_moe", names=("w1", "w3", "w2"))
    yield from decoder(dims, [], [*norms(dims), *attention(dims), *experts])


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    rules,
    (
        *GROUPED_HEADS,
        Rope(default_theta=1000000.0),
        SlidingWindow(default=None),
        NO_BIAS,
        NO_QK_NORM,
        Key("num_local_experts", "num_experts", aliases=("num_experts",), default=8),
        Key("num_experts_per_tok", "moe_router_topk", default=2),
        *EXPERTS_EVERYWHERE,
    ),
    dialects={**gguf.MIXTRAL, **maxtext.MIXTRAL},
    live=BLOCK_SPARSE_NAMES,
    precedence=1,
    judged=(MCORE,),
)
