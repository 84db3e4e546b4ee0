"""Rules for the names of torchtitan: separate projections in all families, interleaved rotary rows in Llama.

Names are those of torchtitan 0.3.0 (see `formats/dcp/torchtitan.py`). Llama 3 rotates neighbouring elements of a head
and Hugging Face those half a head apart, so the rows of queries and keys are interleaved; Qwen3 is as
on the Hub.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from reshard.algebra.views import View
from reshard.families.dialect import Dialect
from reshard.families.rules import Block, Dims, Rule, native, same, under

EMBEDDING = "tok_embeddings.weight"
TORCHTITAN = Dialect("torchtitan", (EMBEDDING,))
LAYER = "layers.{layer}"


def llama(d: Dims) -> Iterator[Rule]:
    """Llama 3, with interleaved queries and keys."""
    yield from _model(d, interleaved=True)


def qwen3(d: Dims) -> Iterator[Rule]:
    """Qwen3, dense or with experts, with query and key norms."""
    yield from _model(d, interleaved=False)


def _model(d: Dims, *, interleaved: bool) -> Iterator[Rule]:
    table = native(EMBEDDING, d.vocab, d.hidden)
    head = table if d.tied else native("lm_head.weight", d.vocab, d.hidden)
    yield Rule("model.embed_tokens.weight", table)
    yield Rule("lm_head.weight", head, copy=d.tied, written=not d.tied)
    yield same("model.norm.weight", "norm.weight", d.hidden)
    shared = [*_norms(d), *_attention(d, interleaved=interleaved)]
    plain = tuple(layer for layer in range(d.layers) if layer not in d.sparse)
    for block, layers in ((_mlp(d), plain), (_experts(d), d.sparse)):
        if layers:
            yield from under("model.layers.{layer}", LAYER, [*shared, *block], layers)


def _norms(d: Dims) -> Block:
    return [
        same("input_layernorm.weight", "attention_norm.weight", d.hidden),
        same("post_attention_layernorm.weight", "ffn_norm.weight", d.hidden),
    ]


def _attention(d: Dims, *, interleaved: bool) -> Block:
    rules = [same("self_attn.o_proj.weight", "attention.wo.weight", d.hidden, d.heads * d.head_dim)]
    for hf, titan, heads in (("q", "wq", d.heads), ("k", "wk", d.groups), ("v", "wv", d.groups)):
        for kind, inner in (("weight", (d.hidden,)), *((("bias", ()),) if d.qkv_bias else ())):
            rows = native(f"attention.qkv_linear.{titan}.{kind}", heads * d.head_dim, *inner)
            view = _halves(rows, heads) if interleaved and hf != "v" else rows
            rules.append(Rule(f"self_attn.{hf}_proj.{kind}", view))
    if d.qk_norm:
        rules.append(same("self_attn.q_norm.weight", "attention.q_norm.weight", d.head_dim))
        rules.append(same("self_attn.k_norm.weight", "attention.k_norm.weight", d.head_dim))
    return rules


def _halves(rows: View, heads: int) -> View:
    """Rows in the order of Hugging Face: the even rows of a head, then the odd ones."""
    pairs = rows.split(0, heads, rows.shape[0] // heads // 2, 2)
    rest = range(3, len(pairs.shape))
    return pairs.permute(0, 2, 1, *rest).merge(0, 3)


PROJECTIONS = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))


def _gated(d: Dims, ffn: int, hf: str, titan: str) -> Block:
    shapes = {"w1": (ffn, d.hidden), "w3": (ffn, d.hidden), "w2": (d.hidden, ffn)}
    return [same(f"{hf}.{name}.weight", f"{titan}.{w}.weight", *shapes[w]) for name, w in PROJECTIONS]


def _mlp(d: Dims) -> Block:
    return _gated(d, d.ffn, "mlp", "feed_forward")


def _experts(d: Dims) -> Block:
    experts = _gated(d, d.expert_ffn, "mlp.experts.{expert}", "moe.experts.{expert}")
    return [
        same("mlp.gate.weight", "moe.router.gate.weight", d.experts, d.hidden),
        *(replace(rule, experts=d.experts) for rule in experts),
    ]
