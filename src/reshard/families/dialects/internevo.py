"""Rules for the names of InternEvo: InternLM, InternLM2 and Llama as InternEvo trains them.

Its dialects are named after the models that defined the tensor names: "internlm" and "internlm2", which Llama shares.
If query and key rows are interleaved in pairs (`adapt_hf` off), the dialect's name ends in "-interleaved". Llama's
names in "internlm2" are those of Meta's own code, whose rows are interleaved. Sources:
`model/modeling_{internlm,internlm2,llama,moe}.py` of InternEvo 0.4.9, and the models for transformers that it ships.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from reshard.algebra.views import View, concat
from reshard.families.dialect import Dialect
from reshard.families.dims import Dims
from reshard.families.family import Rules
from reshard.families.rules import GATED, Block, Rule, native, same, under

HUB_LAYER = "model.layers.{layer}"
W123 = ("w1", "w3", "w2")
"""The gate, up and down projections of InternEvo, and of InternLM2 on the Hub."""

HUB_ENDS = {"model.embed_tokens.weight": "model.tok_embeddings.weight", "lm_head.weight": "output.weight"}
"""InternLM2's names for the embedding and the head."""


EMBEDDINGS = {"internlm": "embedding.weight", "internlm2": "tok_embeddings.weight"}


def dialect(name: str, *, interleaved: bool) -> Dialect:
    """One of InternEvo's dialects with one of the orders of rotary rows."""
    return Dialect(f"{name}-interleaved" if interleaved else name, (EMBEDDINGS[name],))


def dialects(name: str, rules: Callable[[Dims, bool], Iterable[Rule]]) -> Mapping[str, Rules]:
    """The rules for one of InternEvo's dialects with both orders of rotary rows."""
    orders = (False, True)
    return {dialect(name, interleaved=each).name: partial(_ordered, rules, each) for each in orders}


def _ordered(rules: Callable[[Dims, bool], Iterable[Rule]], interleaved: bool, dims: Dims) -> Iterable[Rule]:
    return rules(dims, interleaved)


def in_halves(view: View, axis: int) -> View:
    """The rows of a head in the Hub's order, from interleaved pairs: row 2i goes to i, and 2i + 1 to i + d/2."""
    pairs = view.split(axis, view.shape[axis] // 2, 2)
    order = [*range(axis), axis + 1, axis, *range(axis + 2, len(pairs.shape))]
    return pairs.permute(*order).merge(axis)


def heads_in_halves(view: View, dims: Dims, interleaved: bool) -> View:
    """The same for a complete projection, whose first axis spans all heads."""
    if not interleaved:
        return view
    heads = view.split(0, view.shape[0] // dims.head_dim, dims.head_dim)
    return in_halves(heads, 1).merge(0)


def _mlp(dims: Dims, ffn: int, hf: str, names: tuple[str, str, str], evo: str) -> Block:
    """A gated MLP with separate projections, as in InternEvo."""
    shapes = ((ffn, dims.hidden), (ffn, dims.hidden), (dims.hidden, ffn))
    return [
        same(f"{hf}.{name}.weight", f"{evo}.{own}.weight", *shape)
        for name, own, shape in zip(names, W123, shapes, strict=True)
    ]


def _end_rules(dims: Dims, embedding: str, head: str, hub: Mapping[str, str]) -> Iterator[Rule]:
    """Embedding, final norm and head; the Hub uses Llama's names, or those in `hub`."""

    def hub_name(name: str) -> str:
        return hub.get(name, name)

    yield same(hub_name("model.embed_tokens.weight"), embedding, dims.vocab, dims.hidden)
    yield same("model.norm.weight", "norm.weight", dims.hidden)
    if not dims.tied:
        yield same(hub_name("lm_head.weight"), head, dims.vocab, dims.hidden)


def evo_internlm(dims: Dims, interleaved: bool) -> Iterator[Rule]:
    """InternLM: Wqkv stacks the three projections by rows; with experts, `mlp` is their layer."""
    yield from _end_rules(dims, "embedding.weight", "head.weight", {})
    block = [
        same("input_layernorm.weight", "norm1.weight", dims.hidden),
        same("post_attention_layernorm.weight", "norm2.weight", dims.hidden),
        same("self_attn.o_proj.weight", "mixer.out_proj.weight", dims.hidden, dims.heads * dims.head_dim),
    ]
    if dims.bias:
        block.append(same("self_attn.o_proj.bias", "mixer.out_proj.bias", dims.hidden))
    rows = 3 * dims.heads * dims.head_dim
    for kind, inner in (("weight", (dims.hidden,)), *([("bias", ())] if dims.qkv_bias else [])):
        query, key, value = (
            native(f"mixer.Wqkv.{kind}", rows, *inner).split(0, 3, rows // 3)[i] for i in range(3)
        )
        block.append(Rule(f"self_attn.q_proj.{kind}", heads_in_halves(query, dims, interleaved)))
        block.append(Rule(f"self_attn.k_proj.{kind}", heads_in_halves(key, dims, interleaved)))
        block.append(Rule(f"self_attn.v_proj.{kind}", value))
    if dims.experts:
        experts = _mlp(dims, dims.expert_ffn, "mlp.experts.{expert}", W123, "mlp.moe_layer.experts.{expert}")
        block += [replace(rule, experts=dims.experts) for rule in experts]
        block.append(same("mlp.gate.weight", "mlp.moe_layer.gate.wg.weight", dims.experts, dims.hidden))
    else:
        block += _mlp(dims, dims.ffn, "mlp", GATED, "mlp")
    yield from under(HUB_LAYER, "blocks.{layer}", block, tuple(range(dims.layers)))


def evo_internlm2(dims: Dims, interleaved: bool) -> Iterator[Rule]:
    """InternLM2: names and fused projection are the Hub's."""
    yield from _end_rules(dims, "tok_embeddings.weight", "output.weight", HUB_ENDS)
    group = dims.heads // dims.groups + 2
    rows = dims.groups * group * dims.head_dim

    def fused(kind: str, *inner: int) -> Rule:
        view = native(f"attention.wqkv.{kind}", rows, *inner)
        if interleaved:
            heads = view.split(0, dims.groups, group, dims.head_dim)
            rotated = in_halves(heads[:, :-1], 2)
            view = concat([rotated, heads[:, -1:]], axis=1).reshape(rows, *inner)
        return Rule(f"attention.wqkv.{kind}", view)

    block = [
        fused("weight", dims.hidden),
        same("attention.wo.weight", "attention.wo.weight", dims.hidden, dims.heads * dims.head_dim),
        *(same(f"{norm}.weight", f"{norm}.weight", dims.hidden) for norm in ("attention_norm", "ffn_norm")),
        *_mlp(dims, dims.ffn, "feed_forward", W123, "feed_forward"),
    ]
    if dims.bias:
        block += [fused("bias"), same("attention.wo.bias", "attention.wo.bias", dims.hidden)]
    yield from under(HUB_LAYER, "layers.{layer}", block, tuple(range(dims.layers)))


def evo_llama(dims: Dims, interleaved: bool) -> Iterator[Rule]:
    """Llama in InternEvo: the names of InternLM2, separate projections, and no biases."""
    yield from _end_rules(dims, "tok_embeddings.weight", "output.weight", {})
    query = native("attention.wq.weight", dims.heads * dims.head_dim, dims.hidden)
    key = native("attention.wk.weight", dims.groups * dims.head_dim, dims.hidden)
    block = [
        Rule("self_attn.q_proj.weight", heads_in_halves(query, dims, interleaved)),
        Rule("self_attn.k_proj.weight", heads_in_halves(key, dims, interleaved)),
        same("self_attn.v_proj.weight", "attention.wv.weight", dims.groups * dims.head_dim, dims.hidden),
        same("self_attn.o_proj.weight", "attention.wo.weight", dims.hidden, dims.heads * dims.head_dim),
        same("input_layernorm.weight", "attention_norm.weight", dims.hidden),
        same("post_attention_layernorm.weight", "ffn_norm.weight", dims.hidden),
        *_mlp(dims, dims.ffn, "mlp", GATED, "feed_forward"),
    ]
    yield from under(HUB_LAYER, "layers.{layer}", block, tuple(range(dims.layers)))
