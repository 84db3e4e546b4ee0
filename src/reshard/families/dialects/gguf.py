"""Rules for the tensor names of llama.cpp, which GGUF files have.

Projections are separate. Llama and Mistral rotate neighbouring elements of a head, so the rows of their queries and
keys are interleaved. Gemma's norms are stored plus one. The experts of a layer are one tensor. Latent attention is
stored as it is computed when keys are absorbed: `kv_b_proj` in two parts, of which that of the keys is transposed.

Source: `conversion/*.py` and `gguf-py/gguf/tensor_mapping.py` of llama.cpp, as of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from reshard.algebra.views import View, concat
from reshard.families.dialect import Dialect
from reshard.families.dialects.internevo import heads_in_halves
from reshard.families.rules import GATED, Block, Dims, Rule, native, plus, same, under

EMBEDDING = "token_embd.weight"
GGUF = Dialect("gguf", (EMBEDDING,), widened=True, sharded=False)
HUB_LAYER, LAYER = "model.layers.{layer}", "blk.{layer}"
FFN = ("ffn_gate", "ffn_up", "ffn_down")


def llama(d: Dims) -> Iterator[Rule]:
    """Llama and Mistral, with interleaved queries and keys."""
    yield from _ends(d)
    yield from _layers(d, [*_norms(d), *_attention(d, interleaved=True), *_mlp(d)])


def mixtral(d: Dims) -> Iterator[Rule]:
    """Mixtral: Llama with experts, which the Hub calls w1, w3 and w2."""
    yield from _ends(d)
    experts = _experts(d, "block_sparse_moe", ("w1", "w3", "w2"))
    yield from _layers(d, [], [*_norms(d), *_attention(d, interleaved=True), *experts])


def qwen(d: Dims) -> Iterator[Rule]:
    """Qwen2 and Qwen3, dense or with experts."""
    yield from _ends(d)
    block = [*_norms(d), *_attention(d)]
    yield from _layers(d, [*block, *_mlp(d)], [*block, *_experts(d)])


def gemma(d: Dims) -> Iterator[Rule]:
    """Gemma: zero-centred norms."""
    yield from _plus_one([*_ends(d), *_layers(d, [*_norms(d), *_attention(d), *_mlp(d)])])


def sandwich(d: Dims) -> Iterator[Rule]:
    """Gemma 2 and 3: zero-centred norms, of inputs and outputs."""
    norms = _named_norms(
        d,
        input_layernorm="attn_norm",
        post_attention_layernorm="post_attention_norm",
        pre_feedforward_layernorm="ffn_norm",
        post_feedforward_layernorm="post_ffw_norm",
    )
    yield from _plus_one([*_ends(d), *_layers(d, [*norms, *_attention(d), *_mlp(d)])])


def gpt_oss(d: Dims) -> Iterator[Rule]:
    """gpt-oss: sinks, and biases everywhere. The Hub stacks its experts as [inputs, outputs], gate and up in turn."""
    yield from _ends(d)
    norms = _named_norms(d, input_layernorm="attn_norm", post_attention_layernorm="post_attention_norm")
    own = [
        same("self_attn.sinks", "attn_sinks.weight", d.heads),
        same("mlp.router.weight", "ffn_gate_inp.weight", d.experts, d.hidden),
        same("mlp.router.bias", "ffn_gate_inp.bias", d.experts),
    ]
    down = native("ffn_down_exps.weight", d.experts, d.hidden, d.expert_ffn)
    stacked = [
        Rule("mlp.experts.gate_up_proj", _in_turn(d, "weight", d.hidden).permute(0, 2, 1)),
        Rule("mlp.experts.gate_up_proj_bias", _in_turn(d, "bias")),
        Rule("mlp.experts.down_proj", down.permute(0, 2, 1)),
        same("mlp.experts.down_proj_bias", "ffn_down_exps.bias", d.experts, d.hidden),
    ]
    yield from _layers(d, [], [*norms, *_attention(d), *own, *stacked])


def deepseek(d: Dims) -> Iterator[Rule]:
    """DeepSeek-V3. Layers for multi-token prediction are not stored."""
    yield from _ends(d)
    block = [*_norms(d), *_latent_attention(d)]
    yield from _layers(d, [*block, *_mlp(d)], [*block, *_experts(d)])


LLAMA, MIXTRAL, QWEN, GEMMA, SANDWICH, GPT_OSS, DEEPSEEK = (
    {GGUF.name: rules} for rules in (llama, mixtral, qwen, gemma, sandwich, gpt_oss, deepseek)
)
"""What families list in their `dialects`."""


def _ends(d: Dims) -> Iterator[Rule]:
    table = native(EMBEDDING, d.vocab, d.hidden)
    head = table if d.tied else native("output.weight", d.vocab, d.hidden)
    yield Rule("model.embed_tokens.weight", table)
    yield Rule("lm_head.weight", head, copy=d.tied, written=not d.tied)
    yield same("model.norm.weight", "output_norm.weight", d.hidden)


def _layers(d: Dims, dense: Block, sparse: Block | None = None) -> Iterator[Rule]:
    """All decoder layers: `sparse` for layers with experts, `dense` for the others."""
    plain = tuple(layer for layer in range(d.layers) if layer not in d.sparse)
    for block, layers in ((dense, plain), (sparse or [], d.sparse)):
        if layers:
            yield from under(HUB_LAYER, LAYER, block, layers)


def _named_norms(d: Dims, **names: str) -> Block:
    return [same(f"{hf}.weight", f"{own}.weight", d.hidden) for hf, own in names.items()]


_norms = partial(_named_norms, input_layernorm="attn_norm", post_attention_layernorm="ffn_norm")


def _attention(d: Dims, *, interleaved: bool = False) -> Block:
    rules = [same("self_attn.o_proj.weight", "attn_output.weight", d.hidden, d.heads * d.head_dim)]
    for name, heads in (("q", d.heads), ("k", d.groups), ("v", d.groups)):
        for kind, inner in (("weight", (d.hidden,)), *((("bias", ()),) if d.qkv_bias else ())):
            rows = native(f"attn_{name}.{kind}", heads * d.head_dim, *inner)
            view = heads_in_halves(rows, d, interleaved and name != "v")
            rules.append(Rule(f"self_attn.{name}_proj.{kind}", view))
    if d.bias:
        rules.append(same("self_attn.o_proj.bias", "attn_output.bias", d.hidden))
    if d.qk_norm:
        rules += [
            same(f"self_attn.{each}_norm.weight", f"attn_{each}_norm.weight", d.head_dim) for each in "qk"
        ]
    return rules


def _latent_attention(d: Dims) -> Block:
    key = native("attn_k_b.weight", d.heads, d.kv_lora, d.qk_nope).permute(0, 2, 1)
    value = native("attn_v_b.weight", d.heads, d.v_head, d.kv_lora)
    both = concat([key, value], axis=1).reshape(d.heads * (d.qk_nope + d.v_head), d.kv_lora)
    wide = d.kv_lora + d.qk_rope
    hf, queries = "self_attn.", d.heads * (d.qk_nope + d.qk_rope)
    rules = [
        Rule(f"{hf}kv_b_proj.weight", both),
        same(f"{hf}kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight", wide, d.hidden),
        same(f"{hf}kv_a_layernorm.weight", "attn_kv_a_norm.weight", d.kv_lora),
        same(f"{hf}o_proj.weight", "attn_output.weight", d.hidden, d.heads * d.v_head),
    ]
    if not d.q_lora:
        return [*rules, same(f"{hf}q_proj.weight", "attn_q.weight", queries, d.hidden)]
    return [
        *rules,
        same(f"{hf}q_a_proj.weight", "attn_q_a.weight", d.q_lora, d.hidden),
        same(f"{hf}q_a_layernorm.weight", "attn_q_a_norm.weight", d.q_lora),
        same(f"{hf}q_b_proj.weight", "attn_q_b.weight", queries, d.q_lora),
    ]


def _mlp(d: Dims) -> Block:
    rules = _gated(d, d.ffn, "mlp", "")
    if d.bias:
        widths = dict(zip(FFN, (d.ffn, d.ffn, d.hidden), strict=True))
        rules += [
            same(f"mlp.{hf}.bias", f"{own}.bias", widths[own]) for hf, own in zip(GATED, FFN, strict=True)
        ]
    return rules


def _gated(d: Dims, ffn: int, hf: str, suffix: str) -> Block:
    shapes = ((ffn, d.hidden), (ffn, d.hidden), (d.hidden, ffn))
    return [
        same(f"{hf}.{name}.weight", f"{own}{suffix}.weight", *shape)
        for name, own, shape in zip(GATED, FFN, shapes, strict=True)
    ]


def _experts(d: Dims, hf: str = "mlp", names: tuple[str, ...] = GATED) -> Block:
    """The router, the experts stacked as [experts, outputs, inputs], and a shared expert if the model has one."""
    shapes = ((d.expert_ffn, d.hidden), (d.expert_ffn, d.hidden), (d.hidden, d.expert_ffn))
    rules = [same(f"{hf}.gate.weight", "ffn_gate_inp.weight", d.experts, d.hidden)]
    for name, own, shape in zip(names, FFN, shapes, strict=True):
        stacked = native(f"{own}_exps.weight", d.experts, *shape)
        rules += [
            Rule(f"{hf}.experts.{expert}.{name}.weight", stacked[expert]) for expert in range(d.experts)
        ]
    if d.router_bias:
        rules.append(same(f"{hf}.gate.e_score_correction_bias", "exp_probs_b.bias", d.experts))
    if d.shared_ffn:
        rules += _gated(d, d.shared_ffn, f"{hf}.shared_experts", "_shexp")
    return rules


def _in_turn(d: Dims, kind: str, *inner: int) -> View:
    """The outputs of gate and up projection of all experts, in turn."""
    halves = (
        native(f"{own}_exps.{kind}", d.experts, d.expert_ffn, *inner).split(1, d.expert_ffn, 1)
        for own in FFN[:2]
    )
    return concat([*halves], axis=2).merge(1)


def _plus_one(rules: list[Rule]) -> Iterator[Rule]:
    return (replace(rule, change=plus(-1.0)) if rule.hf.endswith("norm.weight") else rule for rule in rules)
