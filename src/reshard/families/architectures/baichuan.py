"""Baichuan-7B: Llama with query, key and value fused into one projection on the Hub."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families.config_entries import Config, ConfigEntry
from reshard.families.config_map import DERIVED_HEADS, NO_BIAS, NO_QK_NORM
from reshard.families.dims import Dims
from reshard.families.family import MCORE, Family
from reshard.families.rope import Rope
from reshard.families.rules import Rule, attention, decoder, ends, mlp, norms


class Variants(ConfigEntry):
    """What the larger and later Baichuan models compute differently from Baichuan-7B.

    Source: modeling_baichuan.py of baichuan-inc/Baichuan-13B-Base, Baichuan2-7B-Base and Baichuan2-13B-Base.
    """

    def differs(self, config: Config) -> Iterator[tuple[str, str]]:
        if "model_max_length" in config and "max_position_embeddings" not in config:
            difference = "no max_position_embeddings: attention of this model uses ALiBi"
            yield "model_max_length", f"{difference}, which Megatron-Core does not have"
        if "z_loss_weight" in config:
            difference = "Baichuan 2 normalises the rows of its head"
            yield "z_loss_weight", f"{difference}; Megatron-Core computes with the head as it is stored"


def rules(dims: Dims) -> Iterator[Rule]:
    """W_pack is all queries, then all keys, then all values, stacked by rows."""
    yield from ends(dims)
    yield from decoder(dims, [*norms(dims), *attention(dims, fused="W_pack"), *mlp(dims)])


BAICHUAN = Family(
    "baichuan",
    "BaichuanForCausalLM",
    rules,
    (*DERIVED_HEADS, Rope(), Variants(), NO_BIAS, NO_QK_NORM),
    judged=(MCORE,),
)
