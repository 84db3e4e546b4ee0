"""What the formats of Megatron-Core know of each name that a family declares: how ranks share it, and its norm.

A round trip does not show a mistake here, because reading and writing share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest

from reshard.base.errors import ReshardError
from reshard.families import FAMILIES
from reshard.families.binding import Binding
from reshard.families.dims import Dims
from reshard.families.family import ENGINE_TITLES
from reshard.formats.megatron.mcore import (
    FUSED_NORMS,
    PARALLEL_LINEARS,
    SPLITS,
    WHOLE,
    LayerSpelling,
    is_carried,
    place_of,
    refuse_undeclared,
    split_of,
    tail,
)

EVERYTHING = Dims(
    layers=4,
    hidden=64,
    heads=8,
    groups=4,
    head_dim=16,
    ffn=96,
    vocab=280,
    padded_vocab=384,
    tied=False,
    qkv_bias=True,
    output_bias=True,
    bias=True,
    qk_norm=True,
    experts=4,
    expert_ffn=32,
    shared_ffn=32,
    shared_gate=True,
    router_bias=True,
    sparse=(1, 3),
    q_lora=16,
    kv_lora=16,
    qk_nope=16,
    qk_rope=8,
    v_head=16,
    index_heads=2,
    index_dim=16,
    indexed=(1, 3),
    pattern=tuple(map(ord, "M*-E")),
    mamba=(8, 8, 2, 16),
    mtp=1,
    output_gate=True,
    delta=(0, 2),
    key_heads=4,
    value_heads=8,
    key_dim=16,
    value_dim=16,
    kernel=4,
    rope_scaled=True,
    windowed=(0, 2),
    global_head_dim=32,
    global_groups=2,
    keys_are_values=True,
    sharing=1,
    wide_sharing=True,
    layer_dim=8,
    layer_vocab=280,
    topk=2,
    hashed=1,
    ratios=(0, 4, 128, 4),
    streams=2,
    output_groups=2,
    output_lora=8,
    window_groups=2,
    window_heads=4,
    value_head=0,
    lightning=(0, 2),
    stream_rank=8,
    ngrams=(32, 4, 3, 2, 20, 8, 3),
    ngram_layers=(3,),
)
"""Sizes with which the rules of a family have all of its tensors, if queries have a low rank."""


class Declared(NamedTuple):
    """The names of all native tensors that rules declare, a family that has them, and the rank of its queries."""

    family: str
    q_lora: int
    names: list[str]


def declared() -> Iterator[Declared]:
    families = {
        family.dialects.get(engine, family.rules): family.name
        for family in FAMILIES.values()
        for engine in ENGINE_TITLES
    }
    for rules, family in families.items():
        for q_lora in (EVERYTHING.q_lora, 0):
            names = Binding(rules(replace(EVERYTHING, q_lora=q_lora))).native
            yield Declared(family, q_lora, list(names))


ALL = list(declared())
NAMES = {name for each in ALL for name in each.names}


def test_all_are_of_the_language_model() -> None:
    """Or, as MiniMax-M3's indexers, beside it in Megatron-Bridge."""
    beside = {name.partition(".")[0] for name in NAMES if is_carried(name)}
    assert beside == {"lightning_indexers"}


def test_all_are_cut_or_whole_and_nothing_else_is() -> None:
    refuse_undeclared(NAMES)
    own = {tail(place_of(name).module, 2) for name in NAMES if not is_carried(name)}
    assert own == SPLITS.keys() | WHOLE
    assert SPLITS.keys() & WHOLE == set()


def test_convolutions_over_embedded_n_grams_are_whole() -> None:
    convolutions = {name: split_of(name) is None for name in NAMES if name.endswith("conv1d.weight")}
    assert convolutions == {name: ".ple." in name for name in convolutions}
    assert set(convolutions.values()) == {True, False}


def test_a_name_that_is_neither_is_refused() -> None:
    unknown = "self_attention.linear_nobodys.weight"
    renamed = (f"decoder.layers.{layer}.{unknown}" for layer in range(2))
    with pytest.raises(ReshardError) as caught:
        refuse_undeclared([*NAMES, *renamed, "visual.anything.weight"])
    assert [(each.code, each.tensor) for each in caught.value.problems] == [
        ("megatron-split-undeclared", unknown)
    ]


def test_all_linears_that_are_cut_save_an_extra_state() -> None:
    """Tables of tokens, convolutions, and those that Megatron-Core saves in parts have no such state, or another."""
    cut = {name.removesuffix(".weight").rpartition(".")[2] for name in NAMES if split_of(name)}
    cut = {each for each in cut if f"{each}.weight" in SPLITS}
    tables = {"word_embeddings", "per_layer_embedding", "ngram_embedding"}
    assert cut - tables - {"output_layer", "conv1d"} - set(PARALLEL_LINEARS) == set()


@pytest.mark.parametrize("transformer_engine", [True, False])
def test_a_norm_is_fused_into_a_linear_that_its_layer_has(transformer_engine: bool) -> None:
    wrong = set()
    for family, q_lora, names in ALL:
        places = [place_of(name) for name in names]
        spelling = LayerSpelling(places, transformer_engine=transformer_engine, torch_dist=False)
        linears = {(place[1:3], place.module.partition(".weight")[0]) for place in places}
        for place in places:
            spelled = spelling.module(place.module, place[1:3])
            fused = next((each for each in FUSED_NORMS if spelled.endswith(each)), None)
            if fused and (place[1:3], spelled.rpartition(".")[0]) not in linears:
                wrong.add((family, q_lora, spelled))
    assert wrong == set()


def test_the_first_norm_of_a_layer_is_fused() -> None:
    """Into the first linear, whatever its name; latent attention does not begin with one that has a norm."""
    for family, q_lora, names in ALL:
        places = [place_of(name) for name in names]
        spelling = LayerSpelling(places, transformer_engine=True, torch_dist=False)
        compressed = any(name.endswith("linear_kv_proj.weight") for name in names)
        latent = any("linear_kv_up_proj" in name for name in names)
        apart = [
            place.module
            for place in places
            if place.module.endswith("input_layernorm.weight")
            and spelling.module(place.module, place[1:3]) == place.module
        ]
        assert latent or compressed or not apart, (family, q_lora)
