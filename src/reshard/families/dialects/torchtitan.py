"""Rules for the names of torchtitan: separate projections in all families, interleaved rotary rows in Llama 3.

Names are those of torchtitan 0.3.0 (see `formats/dcp/torchtitan.py`). Llama 3 rotates neighbouring elements of a head
and Hugging Face those half a head apart, so the rows of queries and keys are interleaved. All others are as on the Hub:
DeepSeek and Llama 4 rotate neighbours there too. Experts that the Hub stacks are [inputs, outputs] there, and
[outputs, inputs] in torchtitan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from reshard.algebra.views import View, concat
from reshard.families.dialect import Dialect
from reshard.families.dims import Dims
from reshard.families.rules import (
    Block,
    Rule,
    latent_attention,
    layer_rules,
    native,
    natively_renamed,
    outer_rules,
    renamed,
    same,
    under,
)

EMBEDDING, HEAD = "tok_embeddings.weight", "lm_head.weight"
TORCHTITAN = Dialect("torchtitan", (EMBEDDING,))
LAYER = "layers.{layer}"


def llama(dims: Dims) -> Iterator[Rule]:
    """Llama 3, with interleaved queries and keys."""
    yield from _model(dims, [*_norms(dims), *_attention(dims, interleaved=True), *_mlp(dims)])


def qwen3(dims: Dims) -> Iterator[Rule]:
    """Qwen3, dense or with experts, with query and key norms."""
    block = [*_norms(dims), *_attention(dims)]
    yield from _model(dims, [*block, *_mlp(dims)], [*block, *_experts(dims)])


def deepseek(dims: Dims) -> Iterator[Rule]:
    """DeepSeek-V3 and V2: latent attention, shared experts, and layers for multi-token prediction."""
    block = [*_norms(dims), *natively_renamed(latent_attention(dims), _LATENT_NAMES)]
    sparse = [*block, *_experts(dims), *_shared(dims, "mlp.shared_experts")]
    if dims.router_bias:
        sparse.append(same("mlp.gate.e_score_correction_bias", "moe.expert_bias", dims.experts))
    yield from _model(dims, [*block, *_mlp(dims)], sparse)
    yield from _multi_token_prediction(dims, sparse)


def gpt_oss(dims: Dims) -> Iterator[Rule]:
    """gpt-oss: sinks, and biases everywhere. Gate and up are in turn, as on the Hub."""
    mlp1 = native("moe.experts.mlp1_weight", dims.experts, 2 * dims.expert_ffn, dims.hidden)
    mlp2 = native("moe.experts.mlp2_weight", dims.experts, dims.hidden, dims.expert_ffn)
    own = [
        same("self_attn.o_proj.bias", "attention.wo.bias", dims.hidden),
        same("self_attn.sinks", "attention.sinks", dims.heads),
        same("mlp.router.weight", "moe.router.gate.weight", dims.experts, dims.hidden),
        same("mlp.router.bias", "moe.router.gate.bias", dims.experts),
        Rule("mlp.experts.gate_up_proj", mlp1.permute(0, 2, 1)),
        same("mlp.experts.gate_up_proj_bias", "moe.experts.mlp1_bias", dims.experts, 2 * dims.expert_ffn),
        Rule("mlp.experts.down_proj", mlp2.permute(0, 2, 1)),
        same("mlp.experts.down_proj_bias", "moe.experts.mlp2_bias", dims.experts, dims.hidden),
    ]
    yield from _model(dims, [], [*_norms(dims), *_attention(dims), *own])


def llama4(dims: Dims) -> Iterator[Rule]:
    """The language model of Llama 4."""
    block = [*_norms(dims), *_attention(dims)]
    gate, up = (_stack(dims, each, dims.expert_ffn, dims.hidden) for each in ("w1", "w3"))
    down = _stack(dims, "w2", dims.hidden, dims.expert_ffn)
    moe = [
        same("mlp.router.weight", "moe.router.gate.weight", dims.experts, dims.hidden),
        Rule("mlp.experts.gate_up_proj", concat([gate, up], axis=1).permute(0, 2, 1)),
        Rule("mlp.experts.down_proj", down.permute(0, 2, 1)),
        *_shared(dims, "mlp.shared_expert"),
    ]
    yield from renamed(_model(dims, [*block, *_mlp(dims)], [*block, *moe]), {".mlp.": ".feed_forward."})


def _model(dims: Dims, dense: Block, sparse: Sequence[Rule] = ()) -> Iterator[Rule]:
    """Embedding, head, final norm and layers: `sparse` for layers with experts, `dense` for the others."""
    yield from outer_rules(dims, EMBEDDING, HEAD, "norm.weight")
    yield from layer_rules(dims, LAYER, dense, sparse)


def _multi_token_prediction(dims: Dims, block: Block) -> Iterator[Rule]:
    """Layers after the last one, with copies of embedding and head on the Hub."""
    own = [
        *block,
        *(same(f"{each}.weight", f"{each}.weight", dims.hidden) for each in ("enorm", "hnorm")),
        same("eh_proj.weight", "eh_proj.weight", dims.hidden, 2 * dims.hidden),
        same("shared_head.norm.weight", "mtp_norm.weight", dims.hidden),
    ]
    copies = (("embed_tokens", EMBEDDING), ("shared_head.head", EMBEDDING if dims.tied else HEAD))
    for layer in range(dims.layers, dims.layers + dims.mtp):
        yield from under(f"model.layers.{layer}", LAYER.format(layer=layer), own)
        for name, of in copies:
            yield Rule(f"model.layers.{layer}.{name}.weight", native(of, dims.vocab, dims.hidden), copy=True)


def _norms(dims: Dims) -> Block:
    return [
        same("input_layernorm.weight", "attention_norm.weight", dims.hidden),
        same("post_attention_layernorm.weight", "ffn_norm.weight", dims.hidden),
    ]


def _attention(dims: Dims, *, interleaved: bool = False) -> Iterator[Rule]:
    yield same("self_attn.o_proj.weight", "attention.wo.weight", dims.hidden, dims.heads * dims.head_dim)
    for hf, titan, heads in (("q", "wq", dims.heads), ("k", "wk", dims.groups), ("v", "wv", dims.groups)):
        for kind, inner in (("weight", (dims.hidden,)), *((("bias", ()),) if dims.qkv_bias else ())):
            rows = native(f"attention.qkv_linear.{titan}.{kind}", heads * dims.head_dim, *inner)
            view = _halves(rows, heads) if interleaved and hf != "v" else rows
            yield Rule(f"self_attn.{hf}_proj.{kind}", view)
    if dims.qk_norm:
        yield same("self_attn.q_norm.weight", "attention.q_norm.weight", dims.head_dim)
        yield same("self_attn.k_norm.weight", "attention.k_norm.weight", dims.head_dim)


_LATENT_NAMES = {
    "self_attention.": "attention.",
    ".linear_kv_down_proj.": ".wkv_a.",
    ".kv_layernorm.": ".kv_norm.",
    ".linear_kv_up_proj.": ".wkv_b.",
    ".linear_proj.": ".wo.",
    ".linear_q_proj.": ".qkv_linear.wq.",
    ".linear_q_down_proj.": ".wq_a.",
    ".q_layernorm.": ".q_norm.",
    ".linear_q_up_proj.": ".wq_b.",
}
"""Latent attention, by Megatron-Core's names."""


def _halves(rows: View, heads: int) -> View:
    """Rows in the order of Hugging Face: the even rows of a head, then the odd ones."""
    pairs = rows.split(0, heads, rows.shape[0] // heads // 2, 2)
    rest = range(3, len(pairs.shape))
    return pairs.permute(0, 2, 1, *rest).merge(0, 3)


PROJECTIONS = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))


def _gated(dims: Dims, ffn: int, hf: str, titan: str) -> Block:
    shapes = {"w1": (ffn, dims.hidden), "w3": (ffn, dims.hidden), "w2": (dims.hidden, ffn)}
    return [same(f"{hf}.{name}.weight", f"{titan}.{w}.weight", *shapes[w]) for name, w in PROJECTIONS]


def _mlp(dims: Dims) -> Block:
    return _gated(dims, dims.ffn, "mlp", "feed_forward")


def _experts(dims: Dims) -> Block:
    experts = _gated(dims, dims.expert_ffn, "mlp.experts.{expert}", "moe.experts.{expert}")
    return [
        same("mlp.gate.weight", "moe.router.gate.weight", dims.experts, dims.hidden),
        *(replace(rule, experts=dims.experts) for rule in experts),
    ]


def _shared(dims: Dims, hf: str) -> Block:
    return _gated(dims, dims.shared_ffn, hf, "moe.shared_experts") if dims.shared_ffn else []


def _stack(dims: Dims, name: str, *shape: int) -> View:
    """The same weight of all experts, as one tensor."""
    each = (native(f"moe.experts.{expert}.{name}.weight", *shape) for expert in range(dims.experts))
    return concat([view.reshape(1, *shape) for view in each])
