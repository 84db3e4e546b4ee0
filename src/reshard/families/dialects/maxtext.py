"""Rules for the names of MaxText, whose kernels are [inputs, outputs], with heads as an axis of their own.

Llama 3.1 rotates neighbouring elements of a head, so the columns of its queries and keys are interleaved; MaxText's
Llama 2 and 3 and Mistral do not, and only the scaling of the rotary embedding tells them apart. All of these, Mixtral
and Gemma 2 store queries divided by the square root of a head's size; Gemma stores the embedding times the square root
of the hidden size, and norms plus one. All of this is computed as MaxText does it, and rounded once to the stored
dtype. The experts of a layer are one tensor.

Inside reshard every layer has tensors of its own, with the number that it has on the Hub, without `decoder` and
without the suffixes of Gemma 2's pairs of layers: `formats/orbax/layer_names.py`. Source: `checkpoint_conversion` of
MaxText, as of August 2026.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import frexp, ldexp, prod, sqrt

from reshard.algebra.views import View
from reshard.families.dialect import Dialect
from reshard.families.dialects.internevo import in_halves
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
    plus,
    same,
)

EMBEDDING, HEAD = "token_embedder.embedding", "logits_dense.kernel"
MAXTEXT = Dialect("maxtext", (EMBEDDING,), sharded=False, padded=True, head=HEAD)
WI = ("wi_0", "wi_1", "wo")
"""The gate, up and down projections."""
NORMS = {
    "input_layernorm": "pre_self_attention_layer_norm",
    "post_attention_layernorm": "post_self_attention_layer_norm",
}
GEMMA_NORMS = {
    "input_layernorm": "pre_self_attention_norm",
    "post_attention_layernorm": "post_self_attention_norm",
    "pre_feedforward_layernorm": "pre_ffw_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def llama(dims: Dims) -> Iterator[Rule]:
    """Llama and Mistral, with divided queries; in Llama 3.1, queries and keys are interleaved."""
    block = [*_norms(dims, NORMS), *_attention(dims, divided=True, interleaved=dims.rope_scaled), *_mlp(dims)]
    yield from _model(dims, block)


def mixtral(dims: Dims) -> Iterator[Rule]:
    """Mixtral, with divided queries; the Hub calls gate, up and down w1, w3 and w2."""
    experts = _experts(dims, "MoeBlock_0", "block_sparse_moe", ("w1", "w3", "w2"))
    yield from _model(dims, [], [*_norms(dims, NORMS), *_attention(dims, divided=True), *experts])


def qwen(dims: Dims) -> Iterator[Rule]:
    """Qwen2 and Qwen3, dense or with experts."""
    block = [*_norms(dims, NORMS), *_attention(dims)]
    yield from _model(dims, [*block, *_mlp(dims)], [*block, *_experts(dims, "moe_block")])


def deepseek(dims: Dims) -> Iterator[Rule]:
    """DeepSeek-V2 and V3. MaxText converts no layers for multi-token prediction."""
    block = [*_norms(dims, NORMS), *_latent_attention(dims)]
    shared = _gated(dims, dims.shared_ffn, "mlp.shared_experts", "DeepSeekMoeBlock_0.shared_experts")
    experts = _experts(dims, "DeepSeekMoeBlock_0.MoeBlock_0")
    yield from _model(
        dims,
        [*block, *_mlp(dims)],
        [*block, *experts, *(shared if dims.shared_ffn else [])],
    )


def gemma2(dims: Dims) -> Iterator[Rule]:
    """Gemma 2: also its queries are divided."""
    yield from _gemma(dims, sqrt(dims.hidden), divided=True)


def gemma3(dims: Dims) -> Iterator[Rule]:
    """Gemma 3: the factor of its embedding is rounded to bfloat16."""
    yield from _gemma(dims, _in_bfloat16(sqrt(dims.hidden)), divided=False)


LLAMA, MIXTRAL, QWEN, DEEPSEEK, GEMMA2, GEMMA3 = (
    {MAXTEXT.name: rules} for rules in (llama, mixtral, qwen, deepseek, gemma2, gemma3)
)
"""What families list in their `dialects`."""


def _gemma(dims: Dims, factor: float, *, divided: bool) -> Iterator[Rule]:
    embedding = ReversibleStep(Step(over=factor), Step(times=factor), rounds=True)
    block = [*_norms(dims, GEMMA_NORMS), *_attention(dims, divided=divided), *_mlp(dims)]
    for rule in _model(dims, block, embedding=embedding):
        is_norm = rule.hf.endswith("norm.weight")
        yield replace(rule, change=plus(-1.0, rounds=True)) if is_norm else rule


def _in_bfloat16(number: float) -> float:
    mantissa, exponent = frexp(number)
    return ldexp(round(mantissa * 256), exponent - 8)


def _model(
    dims: Dims, dense: Block, sparse: Sequence[Rule] = (), embedding: ReversibleStep | None = None
) -> Iterator[Rule]:
    """All tensors: `sparse` are those of layers with experts, `dense` of the others; how the `embedding` changes."""
    names = (EMBEDDING, HEAD, "decoder_norm.scale")
    yield from outer_rules(dims, *names, rows=dims.padded_vocab, change=embedding)
    yield from layer_rules(dims, "layers.{layer}", dense, sparse)


def _norms(dims: Dims, names: dict[str, str]) -> Block:
    return [same(f"{hf}.weight", f"{own}.scale", dims.hidden) for hf, own in names.items()]


def _transposed_kernel(kernel: View, inputs: int) -> View:
    """A kernel whose first axes are its `inputs`, as the matrix [outputs, inputs]."""
    return kernel.reshape(inputs, kernel.numel // inputs).permute(1, 0)


def _kernel(hf: str, own: str, inputs: Iterable[int], outputs: Iterable[int]) -> Rule:
    shape = (*inputs,)
    return Rule(f"{hf}.weight", _transposed_kernel(native(f"{own}.kernel", *shape, *outputs), prod(shape)))


def _attention(dims: Dims, *, divided: bool = False, interleaved: bool = False) -> Iterator[Rule]:
    by = ReversibleStep(Step(times=sqrt(dims.head_dim)), Step(times=1 / sqrt(dims.head_dim)), rounds=True)
    yield _kernel("self_attn.o_proj", "self_attention.out", (dims.heads, dims.head_dim), (dims.hidden,))
    for name, own, heads in (
        ("q", "query", dims.heads),
        ("k", "key", dims.groups),
        ("v", "value", dims.groups),
    ):
        kernel = native(f"self_attention.{own}.kernel", dims.hidden, heads, dims.head_dim)
        view = in_halves(kernel, 2) if interleaved and name != "v" else kernel
        change = by if divided and name == "q" else None
        yield Rule(f"self_attn.{name}_proj.weight", _transposed_kernel(view, dims.hidden), change=change)
        if dims.qkv_bias:
            bias = native(f"self_attention.{own}.bias", heads, dims.head_dim)
            yield Rule(f"self_attn.{name}_proj.bias", bias.merge(0))
        if dims.qk_norm and name != "v":
            yield same(f"self_attn.{name}_norm.weight", f"self_attention.{own}_norm.scale", dims.head_dim)


def _latent_attention(dims: Dims) -> Block:
    hf, own = "self_attn.", "self_attention."
    hidden, query = (dims.hidden,), (dims.heads, dims.qk_nope + dims.qk_rope)
    rules = [
        _kernel(f"{hf}kv_a_proj_with_mqa", f"{own}wkv_a", hidden, (dims.kv_lora + dims.qk_rope,)),
        same(f"{hf}kv_a_layernorm.weight", f"{own}kv_norm.scale", dims.kv_lora),
        _kernel(f"{hf}kv_b_proj", f"{own}wkv_b", (dims.kv_lora,), (dims.heads, dims.qk_nope + dims.v_head)),
        _kernel(f"{hf}o_proj", f"{own}out", (dims.heads, dims.v_head), hidden),
    ]
    if not dims.q_lora:
        return [*rules, _kernel(f"{hf}q_proj", f"{own}query", hidden, query)]
    return [
        *rules,
        _kernel(f"{hf}q_a_proj", f"{own}wq_a", hidden, (dims.q_lora,)),
        same(f"{hf}q_a_layernorm.weight", f"{own}q_norm.scale", dims.q_lora),
        _kernel(f"{hf}q_b_proj", f"{own}wq_b", (dims.q_lora,), query),
    ]


def _mlp(dims: Dims) -> Block:
    return _gated(dims, dims.ffn, "mlp", "mlp")


def _gated(dims: Dims, ffn: int, hf: str, own: str) -> Block:
    shapes = ((dims.hidden, ffn), (dims.hidden, ffn), (ffn, dims.hidden))
    return [
        _kernel(f"{hf}.{name}", f"{own}.{wi}", (ins,), (outs,))
        for name, wi, (ins, outs) in zip(GATED, WI, shapes, strict=True)
    ]


def _experts(dims: Dims, own: str, hf: str = "mlp", names: tuple[str, ...] = GATED) -> Iterator[Rule]:
    """The router, and the experts stacked as [experts, inputs, outputs]."""
    shapes = ((dims.hidden, dims.expert_ffn), (dims.hidden, dims.expert_ffn), (dims.expert_ffn, dims.hidden))
    yield _kernel(f"{hf}.gate", f"{own}.gate", (dims.hidden,), (dims.experts,))
    for name, wi, shape in zip(names, WI, shapes, strict=True):
        stacked = native(f"{own}.{wi}", dims.experts, *shape)
        yield from [
            Rule(f"{hf}.experts.{expert}.{name}.weight", stacked[expert].permute(1, 0))
            for expert in range(dims.experts)
        ]
    if dims.router_bias:
        yield same(f"{hf}.gate.e_score_correction_bias", f"{own}.gate.bias", dims.experts)
