"""Qwen3.8-Flash-Next: Qwen3.5's layers between hyper-connections. Some embed n-grams, those with attention index.

Hyper-connections have the norms of a layer, and one contracts the residual streams in place of the final norm.
Source: `qwen4_exp.py`, `ple.py`, `hyper_connection_gated.py` and `qsa_indexer.py` of mcore-bridge 1.6.5, which builds
its MTP layer with the development branch of megatron-core only; `modeling_qwen4_exp.py` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from math import isqrt

from reshard.families.architectures.qwen3_5 import SEES, by_kind
from reshard.families.architectures.qwen3_next import SHARED_EXPERT, delta_net
from reshard.families.architectures.qwen3_vl import TOWER
from reshard.families.config_entries import NEGATED, Const, Key, same_key
from reshard.families.dims import MOST_MODULES, N_GRAMS, Dims
from reshard.families.family import MCORE_BRIDGE, Family
from reshard.families.rules import Block, Rule, attention, ends, moe, native, same, stacked_experts, under
from reshard.families.rules import by_kind as layers_by_kind
from reshard.families.transformers_5 import by_transformers


def contraction(dims: Dims, module: str) -> Block:
    """How the residual streams become one: before a block, or at the end."""
    wide = dims.streams * dims.hidden
    shapes = {
        "hc_norm": (wide,),
        "input_mix_weight_down": (dims.stream_rank, wide),
        "input_mix_weight_up": (wide, dims.stream_rank),
    }
    return [
        same(f"{module}.{name}.weight", f"{module}.{name}.weight", *shape) for name, shape in shapes.items()
    ]


def hyper_connection(dims: Dims, module: str) -> Block:
    """The same, and how the output of a block is added to each stream."""
    name = f"{module}.block_inject_weight.weight"
    return [*contraction(dims, module), same(name, name, dims.streams, dims.streams * dims.hidden)]


def indexed_attention(dims: Dims) -> Block:
    """Gated attention with an indexer, which has several queries and one key."""
    shapes = {
        "index_qk_proj": ((dims.index_heads + 1) * dims.index_dim, dims.hidden),
        "q_layernorm": (dims.index_dim,),
        "k_layernorm": (dims.index_dim,),
    }
    indexer = [
        same(f"self_attn.indexer.{name}.weight", f"self_attention.indexer.{name}.weight", *shape)
        for name, shape in shapes.items()
    ]
    return [*attention(dims, gates_last=False), *indexer]


def is_prime(number: int) -> bool:
    return number > 1 and all(number % other for other in range(2, isqrt(number) + 1))


def embedded_n_grams(dims: Dims, index: int) -> Block:
    """The n-gram embedding of the layer that is the `index`-th with one.

    Each hash has a table of its own, whose rows are the next prime number. On the Hub, they are cut into shards.
    """
    width, kernel, longest, each, base, multiple, parts = dims.ngrams
    hashes = (longest - 1) * each
    if not (hashes > 0 and multiple > 0 and parts > 0 and (index + 1) * hashes < MOST_MODULES >> 4):
        raise ValueError(f"n-grams of up to {longest} tokens, {each} hashes of each, and {parts} shards")
    primes = islice(filter(is_prime, count(base)), index * hashes, (index + 1) * hashes)
    rows = -(-sum(primes) // multiple) * multiple
    size = -(-rows // parts)
    if (parts - 1) * size >= rows:
        raise ValueError(f"{rows} rows of n-gram embeddings in {parts} shards")
    table = native("ple.ple_embedding.ngram_embedding.weight", rows, width // hashes)
    wide = dims.streams * dims.hidden
    shapes = {
        "ple_embedding.layer_multipliers": (longest,),
        "ple_embedding.ngram_heads_offsets": (hashes,),
        "ple_embedding.ngram_heads_vocab_sizes": (hashes,),
        "key_proj.weight": (wide, width),
        "value_proj.weight": (dims.hidden, width),
        **dict.fromkeys((f"norm_{name}.weight" for name in ("key", "query", "conv")), (wide,)),
        "conv1d.weight": (wide, 1, kernel),
    }
    return [
        *(same(f"ple.{name}", f"ple.{name}", *shape) for name, shape in shapes.items()),
        *(
            Rule(
                f"ple.ple_embedding.ngram_embedding.shard_{part}.weight",
                table[part * size : min((part + 1) * size, rows)],
            )
            for part in range(parts)
        ),
    ]


def layer(dims: Dims, mixer: Block) -> Block:
    """A layer with experts, without n-gram embedding."""
    return [
        *hyper_connection(dims, "attn_hyper_connection"),
        *mixer,
        *hyper_connection(dims, "mlp_hyper_connection"),
        *(rule for rule in moe(dims, shared="shared_expert") if not rule.experts),
        *stacked_experts(dims, transposed=False),
    ]


def rules(dims: Dims) -> Iterator[Rule]:
    """All layers. The MTP layer has attention, and its own contraction."""
    if not dims.experts or not dims.streams:
        raise ValueError("the family has experts and hyper-connections, and the sizes have not")
    if dims.mtp > 1 or (dims.mtp and 1 in dims.ngram_layers):
        raise ValueError("the family has one MTP layer at most, for which the first layer embeds no n-grams")
    yield from (rule for rule in ends(dims) if rule.hf != "model.norm.weight")
    yield from under("model", "decoder", contraction(dims, "hyper_connection_mixer"))
    delta, attends = delta_net(dims, True, by_kind), indexed_attention(dims)

    def of_kind(linear: bool, n_grams: int) -> Block:
        embedded = embedded_n_grams(dims, n_grams) if n_grams >= 0 else []
        return [*embedded, *layer(dims, delta if linear else attends)]

    order = {number - 1: index for index, number in enumerate(sorted(set(dims.ngram_layers)))}
    yield from layers_by_kind([(n in dims.delta, order.get(n, -1)) for n in range(dims.layers)], of_kind)
    if dims.mtp:
        own, wide = "mtp.layers.0", dims.streams * dims.hidden
        yield from under(own, f"{own}.transformer_layer", layer(dims, attends))
        yield from under("mtp", own, contraction(dims, "hyper_connection_mixer"))
        yield same("mtp.pre_fc_norm_embedding.weight", f"{own}.enorm.weight", dims.hidden)
        yield same("mtp.pre_fc_norm_hidden.weight", f"{own}.hnorm.weight", wide)
        yield same("mtp.fc_embedding.weight", f"{own}.e_proj.weight", dims.hidden, dims.hidden)
        yield same("mtp.fc_hidden.weight", f"{own}.h_proj.weight", dims.hidden, dims.hidden)


QWEN4_EXP = Family(
    "qwen4_exp",
    "Qwen4ExpForConditionalGeneration",
    rules,
    (
        *SEES,
        *SHARED_EXPERT,
        Key("norm_topk_prob", "moe_router_pre_softmax", default=True, assumed=False, values=NEGATED),
        Key("moe_intermediate_size", "moe_ffn_hidden_size", also=("ffn_hidden_size",)),
        Const(args={"moe_layer_freq": 1, "linear_decoupled_in_proj": True}),
        *map(same_key, ("hc_count", "hc_lowrank", "output_gate_type", "eos_token_id", "ple_layer_ids")),
        *map(same_key, N_GRAMS),
        *map(same_key, ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim")),
        *map(same_key, ("indexer_budget", "indexer_compress_ratio")),
        Key("seed", "ple_seed", default=1234),
    ),
    # transformers saves one tensor per expert, and the Hub stacks them.
    live=replace(by_transformers("qwen4_exp", "Qwen4ExpForConditionalGeneration"), stacked="mlp.experts"),
    computed_by=MCORE_BRIDGE,
    # Megatron-Bridge has no such model.
    within=replace(TOWER, carried=tuple(replace(part, others={}) for part in TOWER.carried)),
    judged=(MCORE_BRIDGE,),
)
