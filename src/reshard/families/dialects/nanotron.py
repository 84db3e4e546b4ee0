"""Rules for the names of nanotron: Llama, Mistral, SmolLM3 and Qwen2, dense or with experts.

Query, key and value are one tensor, in this order, as are gate and up. Experts are stacked, each transposed. Only with
`rope_interleaved` are neighbouring elements of a head rotated, so that the rows of queries and keys are interleaved.
Source: `models/{llama,qwen}.py` and `nn/moe.py` of nanotron, and its `examples/llama/convert_weights.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from reshard.families.dialect import Dialect
from reshard.families.dialects.internevo import heads_in_halves
from reshard.families.dims import Dims
from reshard.families.family import Rules
from reshard.families.rules import Block, Rule, layer_rules, native, outer_rules, same

MODEL_PREFIX = "model."
EMBEDDING = f"{MODEL_PREFIX}token_position_embeddings.pp_block.token_embedding.weight"
HEAD = f"{MODEL_PREFIX}lm_head.pp_block.weight"
QKV = "attn.qkv_proj."


def dialect(*, interleaved: bool) -> Dialect:
    """Nanotron's dialect with one of the orders of rotary rows."""
    return Dialect("nanotron-interleaved" if interleaved else "nanotron", (EMBEDDING,))


def rules(dims: Dims, *, interleaved: bool) -> Iterator[Rule]:
    """All layers: with experts where the sizes have them."""
    yield from outer_rules(dims, EMBEDDING, HEAD, f"{MODEL_PREFIX}final_layer_norm.pp_block.weight")
    norms = [same(f"{each}.weight", f"{each}.weight", dims.hidden) for each in NORMS]
    shared = [*norms, *_attention(dims, interleaved=interleaved)]
    sparse = [*shared, *_experts(dims)] if dims.experts else []
    dense = [*shared, *_mlp(dims, dims.ffn)]
    yield from layer_rules(dims, f"{MODEL_PREFIX}decoder.{{layer}}.pp_block", dense, sparse)


DIALECTS: Mapping[str, Rules] = {
    dialect(interleaved=each).name: partial(rules, interleaved=each) for each in (False, True)
}
NORMS = ("input_layernorm", "post_attention_layernorm")


def _attention(dims: Dims, *, interleaved: bool) -> Iterator[Rule]:
    rows = dims.heads * dims.head_dim
    yield same("self_attn.o_proj.weight", "attn.o_proj.weight", dims.hidden, rows)
    for kind, inner in (("weight", (dims.hidden,)), *((("bias", ()),) if dims.qkv_bias else ())):
        fused = native(QKV + kind, dims.qkv_rows, *inner)
        begin = 0
        for name, heads in (("q", dims.heads), ("k", dims.groups), ("v", dims.groups)):
            view = fused[begin : begin + heads * dims.head_dim]
            begin += heads * dims.head_dim
            yield Rule(
                f"self_attn.{name}_proj.{kind}", heads_in_halves(view, dims, interleaved and name != "v")
            )


def _mlp(dims: Dims, ffn: int, name: str = "mlp") -> Block:
    both = native(f"{name}.gate_up_proj.weight", 2 * ffn, dims.hidden)
    return [
        Rule(f"{name}.gate_proj.weight", both[:ffn]),
        Rule(f"{name}.up_proj.weight", both[ffn:]),
        same(f"{name}.down_proj.weight", f"{name}.down_proj.weight", dims.hidden, ffn),
    ]


def _experts(dims: Dims) -> Iterator[Rule]:
    both = native("mlp.experts.merged_gate_up_proj", dims.experts, dims.hidden, 2 * dims.expert_ffn).permute(
        0, 2, 1
    )
    down = native("mlp.experts.merged_down_proj", dims.experts, dims.expert_ffn, dims.hidden).permute(0, 2, 1)
    yield from [
        same("mlp.gate.weight", "mlp.router.weight", dims.experts, dims.hidden),
        *_mlp(dims, dims.shared_ffn, "mlp.shared_expert"),
        same("mlp.shared_expert_gate.weight", "mlp.shared_expert_gate.weight", 1, dims.hidden),
    ]
    for expert in range(dims.experts):
        name = f"mlp.experts.{expert}"
        yield from [
            Rule(f"{name}.gate_proj.weight", both[expert, : dims.expert_ffn]),
            Rule(f"{name}.up_proj.weight", both[expert, dims.expert_ffn :]),
            Rule(f"{name}.down_proj.weight", down[expert]),
        ]
