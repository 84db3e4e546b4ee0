"""Rules for the names of torchtitan: separate projections in all families, interleaved rotary rows in Llama 3.

Names are those of torchtitan 0.3.0 (see `formats/dcp/torchtitan.py`). Llama 3 rotates neighbouring elements of a head
and Hugging Face those half a head apart, so the rows of queries and keys are interleaved. All others are as on the Hub:
DeepSeek and Llama 4 rotate neighbours there too. Experts that the Hub stacks are [inputs, outputs] there, and
[outputs, inputs] in torchtitan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from reshard.algebra.views import View, concat
from reshard.families.dialect import Dialect
from reshard.families.rules import Block, Dims, Rule, native, renamed, same, under

EMBEDDING, HEAD = "tok_embeddings.weight", "lm_head.weight"
TORCHTITAN = Dialect("torchtitan", (EMBEDDING,))
LAYER = "layers.{layer}"


def llama(d: Dims) -> Iterator[Rule]:
    """Llama 3, with interleaved queries and keys."""
    yield from _ends(d)
    yield from _layers(d, [*_norms(d), *_attention(d, interleaved=True), *_mlp(d)])


def qwen3(d: Dims) -> Iterator[Rule]:
    """Qwen3, dense or with experts, with query and key norms."""
    yield from _ends(d)
    block = [*_norms(d), *_attention(d)]
    yield from _layers(d, [*block, *_mlp(d)], [*block, *_experts(d)])


def deepseek(d: Dims) -> Iterator[Rule]:
    """DeepSeek-V3 and V2: latent attention, shared experts, and layers for multi-token prediction."""
    yield from _ends(d)
    block = [*_norms(d), *_latent_attention(d)]
    sparse = [*block, *_experts(d), *_shared(d, "mlp.shared_experts")]
    if d.router_bias:
        sparse.append(same("mlp.gate.e_score_correction_bias", "moe.expert_bias", d.experts))
    yield from _layers(d, [*block, *_mlp(d)], sparse)
    yield from _multi_token_prediction(d, sparse)


def gpt_oss(d: Dims) -> Iterator[Rule]:
    """gpt-oss: sinks, and biases everywhere. Gate and up are in turn, as on the Hub."""
    yield from _ends(d)
    mlp1 = native("moe.experts.mlp1_weight", d.experts, 2 * d.expert_ffn, d.hidden)
    mlp2 = native("moe.experts.mlp2_weight", d.experts, d.hidden, d.expert_ffn)
    own = [
        same("self_attn.o_proj.bias", "attention.wo.bias", d.hidden),
        same("self_attn.sinks", "attention.sinks", d.heads),
        same("mlp.router.weight", "moe.router.gate.weight", d.experts, d.hidden),
        same("mlp.router.bias", "moe.router.gate.bias", d.experts),
        Rule("mlp.experts.gate_up_proj", mlp1.permute(0, 2, 1)),
        same("mlp.experts.gate_up_proj_bias", "moe.experts.mlp1_bias", d.experts, 2 * d.expert_ffn),
        Rule("mlp.experts.down_proj", mlp2.permute(0, 2, 1)),
        same("mlp.experts.down_proj_bias", "moe.experts.mlp2_bias", d.experts, d.hidden),
    ]
    yield from _layers(d, [], [*_norms(d), *_attention(d), *own])


def llama4(d: Dims) -> Iterator[Rule]:
    """The language model of Llama 4."""
    yield from _ends(d)
    block = [*_norms(d), *_attention(d)]
    gate, up = (_stack(d, each, d.expert_ffn, d.hidden) for each in ("w1", "w3"))
    down = _stack(d, "w2", d.hidden, d.expert_ffn)
    moe = [
        same("mlp.router.weight", "moe.router.gate.weight", d.experts, d.hidden),
        Rule("mlp.experts.gate_up_proj", concat([gate, up], axis=1).permute(0, 2, 1)),
        Rule("mlp.experts.down_proj", down.permute(0, 2, 1)),
        *_shared(d, "mlp.shared_expert"),
    ]
    yield from renamed(_layers(d, [*block, *_mlp(d)], [*block, *moe]), {".mlp.": ".feed_forward."})


def _ends(d: Dims) -> Iterator[Rule]:
    table = native(EMBEDDING, d.vocab, d.hidden)
    head = table if d.tied else native(HEAD, d.vocab, d.hidden)
    yield Rule("model.embed_tokens.weight", table)
    yield Rule("lm_head.weight", head, copy=d.tied, written=not d.tied)
    yield same("model.norm.weight", "norm.weight", d.hidden)


def _layers(d: Dims, dense: Block, sparse: Block | None = None) -> Iterator[Rule]:
    """All decoder layers: `sparse` for layers with experts, `dense` for the others."""
    plain = tuple(layer for layer in range(d.layers) if layer not in d.sparse)
    for block, layers in ((dense, plain), (sparse or [], d.sparse)):
        if layers:
            yield from under("model.layers.{layer}", LAYER, block, layers)


def _multi_token_prediction(d: Dims, block: Block) -> Iterator[Rule]:
    """Layers after the last one, with copies of embedding and head on the Hub."""
    own = [
        *block,
        *(same(f"{each}.weight", f"{each}.weight", d.hidden) for each in ("enorm", "hnorm")),
        same("eh_proj.weight", "eh_proj.weight", d.hidden, 2 * d.hidden),
        same("shared_head.norm.weight", "mtp_norm.weight", d.hidden),
    ]
    copies = (("embed_tokens", EMBEDDING), ("shared_head.head", EMBEDDING if d.tied else HEAD))
    for layer in range(d.layers, d.layers + d.mtp):
        yield from under(f"model.layers.{layer}", LAYER.format(layer=layer), own)
        for name, of in copies:
            yield Rule(f"model.layers.{layer}.{name}.weight", native(of, d.vocab, d.hidden), copy=True)


def _norms(d: Dims) -> Block:
    return [
        same("input_layernorm.weight", "attention_norm.weight", d.hidden),
        same("post_attention_layernorm.weight", "ffn_norm.weight", d.hidden),
    ]


def _attention(d: Dims, *, interleaved: bool = False) -> Block:
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


def _latent_attention(d: Dims) -> Block:
    hf, own, queries = "self_attn.", "attention.", d.heads * (d.qk_nope + d.qk_rope)
    wide = d.heads * (d.qk_nope + d.v_head)
    rules = [
        same(f"{hf}kv_a_proj_with_mqa.weight", f"{own}wkv_a.weight", d.kv_lora + d.qk_rope, d.hidden),
        same(f"{hf}kv_a_layernorm.weight", f"{own}kv_norm.weight", d.kv_lora),
        same(f"{hf}kv_b_proj.weight", f"{own}wkv_b.weight", wide, d.kv_lora),
        same(f"{hf}o_proj.weight", f"{own}wo.weight", d.hidden, d.heads * d.v_head),
    ]
    if not d.q_lora:
        return [*rules, same(f"{hf}q_proj.weight", f"{own}qkv_linear.wq.weight", queries, d.hidden)]
    return [
        *rules,
        same(f"{hf}q_a_proj.weight", f"{own}wq_a.weight", d.q_lora, d.hidden),
        same(f"{hf}q_a_layernorm.weight", f"{own}q_norm.weight", d.q_lora),
        same(f"{hf}q_b_proj.weight", f"{own}wq_b.weight", queries, d.q_lora),
    ]


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


def _shared(d: Dims, hf: str) -> Block:
    return _gated(d, d.shared_ffn, hf, "moe.shared_experts") if d.shared_ffn else []


def _stack(d: Dims, name: str, *shape: int) -> View:
    """The same weight of all experts, as one tensor."""
    each = (native(f"moe.experts.{expert}.{name}.weight", *shape) for expert in range(d.experts))
    return concat([view.reshape(1, *shape) for view in each])
