"""DeepSeek-V4: compressed attention, hyper-connections, experts that the first layers choose by token, MTP layers.

On the Hub, names begin without `model.`. mcore-bridge builds it with the development branch of megatron-core. Source:
`deepseek_v4.py` of mcore-bridge 1.6.5; `experimental_attention_variant/csa.py`, `hyper_connection.py` and
`moe/router.py` of Megatron-LM's branch `dev`, d48bd6be; `configuration_deepseek_v4.py` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from reshard.algebra.views import concat
from reshard.families.config_entries import (
    Args,
    Config,
    ConfigEntry,
    Const,
    Key,
    SharedExperts,
    Values,
    first,
    same_key,
)
from reshard.families.config_map import MTP, NO_BIAS, QK_NORM
from reshard.families.dims import Dims
from reshard.families.family import MCORE_BRIDGE, Family
from reshard.families.rope import RotaryEmbedding, rope_parameters, rotary_base
from reshard.families.rules import Block, Rule, by_kind, ends, moe, native, norms, renamed, same, under
from reshard.families.transformers_5 import W132_EXPERTS, MemoryNames

KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
"""The layers' kinds of attention, by the number of tokens that are compressed into one."""
SPARSE = 4
"""The ratio of layers with an indexer, whose compressed tokens overlap."""
NAMES = {
    "model.": "",
    "embed_tokens": "embed",
    "lm_head": "head",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.": "ffn.",
    "e_score_correction_bias": "bias",
    ".gate_proj.": ".w1.",
    ".up_proj.": ".w3.",
    ".down_proj.": ".w2.",
}
"""Parts of usual names, and the Hub's of this family."""


def compressor(dims: Dims, hub: str, module: str, ratio: int, size: int) -> Block:
    """What makes one token of `size` of every `ratio` tokens."""
    rows = 2 * size if ratio == SPARSE else size
    return [
        same(f"{hub}.ape", f"{module}.ape", ratio, rows),
        same(f"{hub}.wkv.weight", f"{module}.linear_wkv.weight", rows, dims.hidden),
        same(f"{hub}.wgate.weight", f"{module}.linear_wgate.weight", rows, dims.hidden),
        same(f"{hub}.norm.weight", f"{module}.norm.weight", size),
    ]


def compressed_attention(dims: Dims, ratio: int) -> Block:
    """Low-rank queries, one key that is also the value, an output projection in two steps, a sink for each head."""
    queries, core = dims.heads * dims.head_dim, "self_attention.core_attention"
    low_rank = dims.output_groups * dims.output_lora
    projections = {
        ("wq_a.weight", "linear_q_down_proj.weight"): (dims.q_lora, dims.hidden),
        ("q_norm.weight", "q_layernorm.weight"): (dims.q_lora,),
        ("wq_b.weight", "linear_q_up_proj.weight"): (queries, dims.q_lora),
        ("wkv.weight", "linear_kv_proj.weight"): (dims.head_dim, dims.hidden),
        ("kv_norm.weight", "kv_layernorm.weight"): (dims.head_dim,),
        ("wo_a.weight", "linear_o_group_proj"): (low_rank, queries // dims.output_groups),
        ("wo_b.weight", "linear_proj.weight"): (dims.hidden, low_rank),
        ("attn_sink", "core_attention.attn_sink"): (dims.heads,),
    }
    block = [
        same(f"attn.{hub}", f"self_attention.{own}", *shape) for (hub, own), shape in projections.items()
    ]
    if ratio:
        block += compressor(dims, "attn.compressor", f"{core}.compressor", ratio, dims.head_dim)
    if ratio == SPARSE:
        hub, module, heads = "attn.indexer", f"{core}.indexer", dims.index_heads
        block += [
            same(f"{hub}.wq_b.weight", f"{module}.linear_wq_b.weight", heads * dims.index_dim, dims.q_lora),
            same(f"{hub}.weights_proj.weight", f"{module}.linear_weights_proj.weight", heads, dims.hidden),
            *compressor(dims, f"{hub}.compressor", f"{module}.compressor", ratio, dims.index_dim),
        ]
    return block


def hyper_connection(dims: Dims, hub: str, module: str) -> Block:
    """How the residual streams are read before a block and written after it. Megatron-Core keeps each scale apart."""
    rows = dims.streams * (dims.streams + 2)
    scales = (native(f"{module}.alpha_{each}", 1) for each in ("pre", "post", "res"))
    return [
        same(f"{hub}_fn", f"{module}.mapping_proj.weight", rows, dims.streams * dims.hidden),
        same(f"{hub}_base", f"{module}.bias", rows),
        Rule(f"{hub}_scale", concat(list(scales))),
    ]


def contraction(dims: Dims) -> Block:
    """How the residual streams become one."""
    shapes = {"fn": (dims.streams, dims.streams * dims.hidden), "base": (dims.streams,), "scale": (1,)}
    return [same(f"hc_head_{part}", f"hc_head_{part}", *shape) for part, shape in shapes.items()]


def layer(dims: Dims, ratio: int, hashed: bool) -> Block:
    """A layer; if `hashed`, a table has the experts of each token."""
    table = [same("mlp.gate.tid2eid", "mlp.router.tid2eid", dims.vocab, dims.topk)] if hashed else []
    return [
        *norms(dims),
        *compressed_attention(dims, ratio),
        *moe(replace(dims, router_bias=not hashed)),
        *table,
        *hyper_connection(dims, "hc_attn", "self_attention_hyper_connection"),
        *hyper_connection(dims, "hc_ffn", "mlp_hyper_connection"),
    ]


def rules(dims: Dims) -> Iterator[Rule]:
    """The rules of all layers, in the Hub's names."""
    return renamed(_rules(dims), NAMES)


def _rules(dims: Dims) -> Iterator[Rule]:
    if not dims.experts or len(dims.ratios) != dims.layers:
        raise ValueError(f"{dims.experts} experts, and {len(dims.ratios)} ratios for {dims.layers} layers")
    yield from ends(dims)
    yield from (same(rule.hf, f"decoder.{rule.hf}", *rule.view.shape) for rule in contraction(dims))
    kinds = [(ratio, number < dims.hashed) for number, ratio in enumerate(dims.ratios)]
    yield from by_kind(kinds, partial(layer, dims))
    table = native("embedding.word_embeddings.weight", dims.padded_vocab, dims.hidden)
    head = table if dims.tied else native("output_layer.weight", dims.padded_vocab, dims.hidden)
    for index in range(dims.mtp):
        hub, own = f"mtp.{index}", f"mtp.layers.{index}"
        yield from under(hub, f"{own}.transformer_layer", layer(dims, 0, hashed=False))
        yield from under(hub, own, contraction(dims))
        for name in ("e_proj", "h_proj"):
            yield same(f"{hub}.{name}.weight", f"{own}.{name}.weight", dims.hidden, dims.hidden)
        for name, norm in (("enorm", "enorm"), ("hnorm", "hnorm"), ("norm", "final_layernorm")):
            yield same(f"{hub}.{name}.weight", f"{own}.{norm}.weight", dims.hidden)
        yield Rule(f"{hub}.emb.tok_emb.weight", table[: dims.vocab], copy=True)
        yield Rule(f"{hub}.head.weight", head[: dims.vocab], copy=True)


class LayerKinds(ConfigEntry):
    """Ratios and tables by layer, listed by transformers 5. The Hub lists ratios, and counts layers with tables."""

    def to_args(self, config: Config) -> Values:
        layers, kinds = config.get("num_hidden_layers", 0), config.get("layer_types")
        rates = {**{kind: ratio for ratio, kind in KINDS.items()}, **(config.get("compress_rates") or {})}
        ratios = [rates[kind] for kind in kinds] if kinds else first(config, ("compress_ratios",), ())
        hashed = [kind == "hash_moe" for kind in config.get("mlp_layer_types") or ()]
        return {
            "csa_compress_ratios": list(ratios[:layers]),
            "moe_n_hash_layers": sum(hashed) if hashed else first(config, ("num_hash_layers",), 3),
            "moe_layer_freq": [1] * layers,
        }

    def to_config(self, args: Args) -> Values:
        ratios, hashed = first(args, ("csa_compress_ratios",), ()), first(args, ("moe_n_hash_layers",), 0)
        types = ["hash_moe" if number < hashed else "moe" for number in range(len(ratios))]
        return {
            "layer_types": [KINDS[ratio] for ratio in ratios],
            "mlp_layer_types": types,
            "num_hash_layers": hashed,
        }

    def spellings(self) -> tuple[str, ...]:
        return ("compress_ratios",)


class RopeOfCompressed(RotaryEmbedding):
    """A plain rope for layers with a window only, and another one, which may be YaRN, for compressed tokens.

    transformers 5 calls them `main` and `compress`; the Hub has `rope_theta`, and `compress_rope_theta` with
    `rope_scaling`.
    """

    def spellings(self) -> tuple[str, ...]:
        return (*super().spellings(), "compress_rope_theta")

    def to_args(self, config: Config) -> Values:
        rope = rope_parameters(config)
        main = rope.get("main") or {"rope_theta": config.get("rope_theta")}
        compressed = rope.get("compress") or {**rope, "rope_theta": config.get("compress_rope_theta")}
        scaling = {arg: compressed[key] for key, arg in YARN.items() if compressed.get(key) is not None}
        return {
            "rotary_base": rotary_base(main, 10000.0),
            "csa_compress_rotary_base": rotary_base(compressed, 160000.0),
            "rope_type": "yarn" if "rotary_scaling_factor" in scaling else "rope",
            **scaling,
        }

    def to_config(self, args: Args) -> Values:
        bases = (first(args, ("rotary_base",), 10000), first(args, ("csa_compress_rotary_base",), 160000))
        main, compressed = ({"rope_type": "default", "rope_theta": float(base)} for base in bases)
        if args.get("rope_type") == "yarn":
            yarn = {key: args[arg] for key, arg in YARN.items() if args.get(arg) is not None}
            compressed |= {"rope_type": "yarn", "attention_factor": 1.0, **yarn}
        return {"rope_parameters": {"main": main, "compress": compressed}}


YARN = {
    "factor": "rotary_scaling_factor",
    **{key: key for key in ("original_max_position_embeddings", "beta_fast", "beta_slow")},
}
# save_pretrained of transformers 5.24 calls the norm of keys `attn.norm`, as no checkpoint of the Hub does.
IN_MEMORY = MemoryNames(
    W132_EXPERTS,
    (
        (".self_attn.kv_norm.", ".self_attn.norm."),
        (".compressor.indexer.scorer.weights_proj.", ".indexer.weights_proj."),
        (".compressor.indexer.q_b_proj.", ".indexer.wq_b."),
        (".compressor.indexer.", ".indexer.compressor."),
        (".position_bias", ".ape"),
        ("compressor.kv_norm.", "compressor.norm."),
        ("compressor.gate_proj.", "compressor.wgate."),
        (".kv_proj.", ".wkv."),
        (".self_attn.", ".attn."),
        (".attn.norm.", ".attn.kv_norm."),
        (".mlp.", ".ffn."),
        (".q_a_proj.", ".wq_a."),
        (".q_b_proj.", ".wq_b."),
        (".q_a_norm.", ".q_norm."),
        (".o_a_proj.", ".wo_a."),
        (".o_b_proj.", ".wo_b."),
        (".sinks", ".attn_sink"),
        (".e_score_correction_bias", ".bias"),
        (".shared_experts.gate_proj.", ".shared_experts.w1."),
        (".shared_experts.up_proj.", ".shared_experts.w3."),
        (".shared_experts.down_proj.", ".shared_experts.w2."),
        (".input_layernorm.", ".attn_norm."),
        (".post_attention_layernorm.", ".ffn_norm."),
        (".attn_hc.", ".hc_attn_"),
        (".ffn_hc.", ".hc_ffn_"),
    ),
    (
        ("model.embed_tokens.", "embed."),
        ("lm_head.", "head."),
        ("model.hc_head.hc_", "hc_head_"),
        ("model.", ""),
    ),
)
DEEPSEEK_V4 = Family(
    "deepseek_v4",
    "DeepseekV4ForCausalLM",
    rules,
    (
        Const(
            args={
                "experimental_attention_variant": "dsv4_hybrid",
                "multi_latent_attention": True,
                "enable_hyper_connections": True,
                "moe_router_score_function": "sqrtsoftplus",
                "moe_router_enable_expert_bias": True,
            },
            config={"attention_bias": False},
            computed={"scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "hc_eps": 1e-6},
        ),
        NO_BIAS,
        QK_NORM,
        LayerKinds(),
        RopeOfCompressed(),
        Key("head_dim", "kv_channels", also=("v_head_dim",), default=512),
        Key("qk_rope_head_dim", "qk_pos_emb_head_dim", default=64),
        *map(same_key, ("q_lora_rank", "o_groups", "o_lora_rank")),
        Key("sliding_window", "csa_window_size"),
        Key("index_n_heads", "dsa_indexer_n_heads"),
        Key("index_head_dim", "dsa_indexer_head_dim"),
        Key("index_topk", "dsa_indexer_topk"),
        Key("hc_mult", "num_residual_streams"),
        Key("hc_sinkhorn_iters", "mhc_sinkhorn_iterations"),
        Key("swiglu_limit", "activation_func_clamp_value"),
        Key("num_experts_per_tok", "moe_router_topk"),
        Key("n_routed_experts", "num_experts", aliases=("num_local_experts",)),
        Key("moe_intermediate_size", "moe_ffn_hidden_size", also=("ffn_hidden_size",)),
        SharedExperts(),
        Key("routed_scaling_factor", "moe_router_topk_scaling_factor", none=1.0),
        MTP,
    ),
    live=IN_MEMORY,
    computed_by=MCORE_BRIDGE,
    judged=(MCORE_BRIDGE,),
)
