"""Rules for the tensor names of llama.cpp, which GGUF files have.

Projections are separate. Llama and Mistral rotate neighbouring elements of a head, so the rows of their queries and
keys are interleaved. Gemma's norms are stored plus one. The experts of a layer are one tensor. Latent attention is
stored as it is computed when keys are absorbed: `kv_b_proj` in two parts, of which that of the keys is transposed.

Source: `conversion/*.py` and `gguf-py/gguf/tensor_mapping.py` of llama.cpp, as of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from reshard.algebra.views import View, concat
from reshard.families.dialect import Dialect
from reshard.families.dialects.internevo import heads_in_halves
from reshard.families.dims import Dims
from reshard.families.rules import (
    GATED,
    Block,
    ReversibleStep,
    Rule,
    Step,
    layer_rules,
    native,
    outer_rules,
    renamed,
    same,
)

EMBEDDING = "token_embd.weight"
GGUF = Dialect("gguf", (EMBEDDING,), widened=True, sharded=False)
FFN = ("ffn_gate", "ffn_up", "ffn_down")


def llama(dims: Dims) -> Iterator[Rule]:
    """Llama and Mistral, with interleaved queries and keys."""
    yield from _model(dims, [*_norms(dims), *_attention(dims, interleaved=True), *_mlp(dims)])


def mixtral(dims: Dims) -> Iterator[Rule]:
    """Mixtral: Llama with experts, which the Hub calls w1, w3 and w2."""
    experts = _experts(dims, "block_sparse_moe", ("w1", "w3", "w2"))
    yield from _model(dims, [], [*_norms(dims), *_attention(dims, interleaved=True), *experts])


def qwen(dims: Dims) -> Iterator[Rule]:
    """Qwen2 and Qwen3, dense or with experts."""
    block = [*_norms(dims), *_attention(dims)]
    yield from _model(dims, [*block, *_mlp(dims)], [*block, *_experts(dims)])


def qwen2_moe(dims: Dims) -> Iterator[Rule]:
    """Qwen2-MoE, whose shared expert has a gate."""
    gate = same("mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight", 1, dims.hidden)
    experts = _experts(dims, shared="shared_expert")
    yield from _model(dims, [], [*_norms(dims), *_attention(dims), *experts, gate])


def olmoe(dims: Dims) -> Iterator[Rule]:
    """OLMoE, which normalizes the queries and keys of all heads at once."""
    yield from _model(dims, [], [*_norms(dims), *_attention_of_all_heads(dims), *_experts(dims)])


def minimax(dims: Dims) -> Iterator[Rule]:
    """MiniMax-M2: the same with Mixtral's names, and a biased router."""
    experts = _experts(dims, "block_sparse_moe", ("w1", "w3", "w2"))
    block = [*_norms(dims), *_attention_of_all_heads(dims), *experts]
    names = {"gate.e_score_correction_bias": "e_score_correction_bias"}
    yield from renamed(_model(dims, [], block), names)


def gemma(dims: Dims) -> Iterator[Rule]:
    """Gemma: zero-centred norms."""
    yield from _plus_one(_model(dims, [*_norms(dims), *_attention(dims), *_mlp(dims)]))


def sandwich(dims: Dims) -> Iterator[Rule]:
    """Gemma 2 and 3: zero-centred norms, of inputs and outputs."""
    norms = _named_norms(
        dims,
        input_layernorm="attn_norm",
        post_attention_layernorm="post_attention_norm",
        pre_feedforward_layernorm="ffn_norm",
        post_feedforward_layernorm="post_ffw_norm",
    )
    yield from _plus_one(_model(dims, [*norms, *_attention(dims), *_mlp(dims)]))


def gpt_oss(dims: Dims) -> Iterator[Rule]:
    """gpt-oss: sinks, and biases everywhere. The Hub stacks its experts as [inputs, outputs], gate and up in turn."""
    norms = _named_norms(dims, input_layernorm="attn_norm", post_attention_layernorm="post_attention_norm")
    own = [
        same("self_attn.sinks", "attn_sinks.weight", dims.heads),
        same("mlp.router.weight", "ffn_gate_inp.weight", dims.experts, dims.hidden),
        same("mlp.router.bias", "ffn_gate_inp.bias", dims.experts),
    ]
    down = native("ffn_down_exps.weight", dims.experts, dims.hidden, dims.expert_ffn)
    stacked = [
        Rule("mlp.experts.gate_up_proj", _in_turn(dims, "weight", dims.hidden).permute(0, 2, 1)),
        Rule("mlp.experts.gate_up_proj_bias", _in_turn(dims, "bias")),
        Rule("mlp.experts.down_proj", down.permute(0, 2, 1)),
        same("mlp.experts.down_proj_bias", "ffn_down_exps.bias", dims.experts, dims.hidden),
    ]
    yield from _model(dims, [], [*norms, *_attention(dims), *own, *stacked])


def deepseek(dims: Dims) -> Iterator[Rule]:
    """DeepSeek-V3. Layers for multi-token prediction are not stored."""
    block = [*_norms(dims), *_latent_attention(dims)]
    yield from _model(dims, [*block, *_mlp(dims)], [*block, *_experts(dims)])


LLAMA, MIXTRAL, QWEN, QWEN2_MOE, OLMOE, MINIMAX, GEMMA, SANDWICH, GPT_OSS, DEEPSEEK = (
    {GGUF.name: rules}
    for rules in (llama, mixtral, qwen, qwen2_moe, olmoe, minimax, gemma, sandwich, gpt_oss, deepseek)
)
"""What families list in their `dialects`."""


def _model(dims: Dims, dense: Block, sparse: Sequence[Rule] = ()) -> Iterator[Rule]:
    """All tensors: `sparse` are those of layers with experts, `dense` of the others."""
    yield from outer_rules(dims, EMBEDDING, "output.weight", "output_norm.weight")
    yield from layer_rules(dims, "blk.{layer}", dense, sparse)


def _named_norms(dims: Dims, **names: str) -> Block:
    return [same(f"{hf}.weight", f"{own}.weight", dims.hidden) for hf, own in names.items()]


_norms = partial(_named_norms, input_layernorm="attn_norm", post_attention_layernorm="ffn_norm")


def _attention(dims: Dims, *, interleaved: bool = False) -> Iterator[Rule]:
    yield same("self_attn.o_proj.weight", "attn_output.weight", dims.hidden, dims.heads * dims.head_dim)
    for name, heads in (("q", dims.heads), ("k", dims.groups), ("v", dims.groups)):
        for kind, inner in (("weight", (dims.hidden,)), *((("bias", ()),) if dims.qkv_bias else ())):
            rows = native(f"attn_{name}.{kind}", heads * dims.head_dim, *inner)
            view = heads_in_halves(rows, dims, interleaved and name != "v")
            yield Rule(f"self_attn.{name}_proj.{kind}", view)
    if dims.output_bias:
        yield same("self_attn.o_proj.bias", "attn_output.bias", dims.hidden)
    if dims.qk_norm:
        yield from [
            same(f"self_attn.{each}_norm.weight", f"attn_{each}_norm.weight", dims.head_dim) for each in "qk"
        ]


def _attention_of_all_heads(dims: Dims) -> Block:
    """Attention whose norms of queries and keys are over all heads."""
    heads = {"q": dims.heads, "k": dims.groups}
    norms = (
        same(f"self_attn.{each}_norm.weight", f"attn_{each}_norm.weight", number * dims.head_dim)
        for each, number in heads.items()
    )
    return [*_attention(replace(dims, qk_norm=False)), *norms]


def _latent_attention(dims: Dims) -> Block:
    key = native("attn_k_b.weight", dims.heads, dims.kv_lora, dims.qk_nope).permute(0, 2, 1)
    value = native("attn_v_b.weight", dims.heads, dims.v_head, dims.kv_lora)
    both = concat([key, value], axis=1).reshape(dims.heads * (dims.qk_nope + dims.v_head), dims.kv_lora)
    wide = dims.kv_lora + dims.qk_rope
    hf, queries = "self_attn.", dims.heads * (dims.qk_nope + dims.qk_rope)
    rules = [
        Rule(f"{hf}kv_b_proj.weight", both),
        same(f"{hf}kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight", wide, dims.hidden),
        same(f"{hf}kv_a_layernorm.weight", "attn_kv_a_norm.weight", dims.kv_lora),
        same(f"{hf}o_proj.weight", "attn_output.weight", dims.hidden, dims.heads * dims.v_head),
    ]
    if not dims.q_lora:
        return [*rules, same(f"{hf}q_proj.weight", "attn_q.weight", queries, dims.hidden)]
    return [
        *rules,
        same(f"{hf}q_a_proj.weight", "attn_q_a.weight", dims.q_lora, dims.hidden),
        same(f"{hf}q_a_layernorm.weight", "attn_q_a_norm.weight", dims.q_lora),
        same(f"{hf}q_b_proj.weight", "attn_q_b.weight", queries, dims.q_lora),
    ]


def _mlp(dims: Dims) -> Block:
    rules = _gated(dims, dims.ffn, "mlp", "")
    if dims.bias:
        widths = dict(zip(FFN, (dims.ffn, dims.ffn, dims.hidden), strict=True))
        rules += [
            same(f"mlp.{hf}.bias", f"{own}.bias", widths[own]) for hf, own in zip(GATED, FFN, strict=True)
        ]
    return rules


def _gated(dims: Dims, ffn: int, hf: str, suffix: str) -> Block:
    shapes = ((ffn, dims.hidden), (ffn, dims.hidden), (dims.hidden, ffn))
    return [
        same(f"{hf}.{name}.weight", f"{own}{suffix}.weight", *shape)
        for name, own, shape in zip(GATED, FFN, shapes, strict=True)
    ]


def _experts(
    dims: Dims, hf: str = "mlp", names: tuple[str, ...] = GATED, shared: str = "shared_experts"
) -> Iterator[Rule]:
    """The router, the experts stacked as [experts, outputs, inputs], and a shared expert if the model has one."""
    shapes = ((dims.expert_ffn, dims.hidden), (dims.expert_ffn, dims.hidden), (dims.hidden, dims.expert_ffn))
    yield same(f"{hf}.gate.weight", "ffn_gate_inp.weight", dims.experts, dims.hidden)
    for name, own, shape in zip(names, FFN, shapes, strict=True):
        stacked = native(f"{own}_exps.weight", dims.experts, *shape)
        yield from [
            Rule(f"{hf}.experts.{expert}.{name}.weight", stacked[expert]) for expert in range(dims.experts)
        ]
    if dims.router_bias:
        yield same(f"{hf}.gate.e_score_correction_bias", "exp_probs_b.bias", dims.experts)
    if dims.shared_ffn:
        yield from _gated(dims, dims.shared_ffn, f"{hf}.{shared}", "_shexp")


def _in_turn(dims: Dims, kind: str, *inner: int) -> View:
    """The outputs of gate and up projection of all experts, in turn."""
    halves = (
        native(f"{own}_exps.{kind}", dims.experts, dims.expert_ffn, *inner).split(1, dims.expert_ffn, 1)
        for own in FFN[:2]
    )
    return concat([*halves], axis=2).merge(1)


def _plus_one(rules: Iterable[Rule]) -> Iterator[Rule]:
    """Norms plus one, rounded as the converter rounds them: in float16 if the weights are in float16."""
    change = ReversibleStep(Step(plus=-1.0), Step(plus=1.0, in_torch=True), rounds=True)
    return (replace(rule, change=change) if rule.hf.endswith("norm.weight") else rule for rule in rules)
