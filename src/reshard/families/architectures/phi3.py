"""Phi-3 and Phi-4: Llama with fused projections on the Hub."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families.config_entries import SlidingWindow
from reshard.families.config_map import DERIVED_HEADS, NO_BIAS, NO_QK_NORM
from reshard.families.dims import Dims
from reshard.families.family import MCORE, Family
from reshard.families.rope import Rope
from reshard.families.rules import Rule, attention, decoder, ends, fused_mlp, norms


def rules(dims: Dims) -> Iterator[Rule]:
    """Queries, keys and values are fused into one projection, gate and up into another."""
    yield from ends(dims)
    yield from decoder(dims, [*norms(dims), *attention(dims, fused="qkv_proj"), *fused_mlp(dims)])


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    rules,
    (*DERIVED_HEADS, Rope(fraction=1.0), SlidingWindow(default=None), NO_BIAS, NO_QK_NORM),
    judged=(MCORE,),
)
