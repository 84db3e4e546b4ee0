"""Baichuan-7B: Llama with query, key and value in one projection on the hub."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families import config
from reshard.families.family import Family
from reshard.families.rules import Dims, Rule, attention, decoder, ends, mlp, norms


def rules(d: Dims) -> Iterator[Rule]:
    """W_pack holds all queries above all keys above all values."""
    yield from ends(d)
    yield from decoder(d, [*norms(d), *attention(d, fused="W_pack"), *mlp(d)])


BAICHUAN = Family("baichuan", "BaichuanForCausalLM", config.BAICHUAN, rules)
