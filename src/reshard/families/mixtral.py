"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families import config
from reshard.families.family import Family
from reshard.families.rules import Dims, Rule, attention, decoder, ends, moe, norms


def rules(d: Dims) -> Iterator[Rule]:
    """The hub calls gate, up and down w1, w3 and w2."""
    yield from ends(d)
    experts = moe(d, hf="block_sparse_moe", names=("w1", "w3", "w2"))
    yield from decoder(d, [], [*norms(d), *attention(d), *experts])


MIXTRAL = Family("mixtral", "MixtralForCausalLM", config.MIXTRAL, rules)
