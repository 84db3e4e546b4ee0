"""MiniMax-M3: a vision tower, and behind a few dense layers, MiniMax-M2's experts with one that is shared.

Megatron-Bridge stores the indexers of sparse attention, and computes full attention, which is the same for as many
tokens as the indexers select. Source: `models/minimax_m3` of Megatron-Bridge 0.6.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from reshard.families.architectures.minimax_m2 import RotaryDim
from reshard.families.config_entries import (
    Activation,
    Args,
    Config,
    ConfigEntry,
    Const,
    Key,
    SigmoidNorm,
    Values,
    first,
)
from reshard.families.config_map import GROUPED_HEADS, NO_BIAS, QK_NORM
from reshard.families.dims import Dims, sparse_layers
from reshard.families.family import MEGATRON_BRIDGE, Family
from reshard.families.outer_model import CarriedTensors, OuterModel
from reshard.families.rules import (
    Rule,
    attention,
    decoder,
    ends,
    gated_mlp,
    mlp,
    moe,
    norms,
    renamed,
    same,
    under,
)
from reshard.families.transformers_5 import by_transformers


def rules(dims: Dims) -> Iterator[Rule]:
    """The indexers of all layers are outside of the language model on Megatron's side."""
    yield from ends(dims)
    before = [*norms(dims), *attention(dims)]
    routed = moe(replace(dims, shared_ffn=0), "block_sparse_moe", ("w1", "w3", "w2"))
    shared = gated_mlp(dims, dims.shared_ffn, "block_sparse_moe.shared_experts", "mlp.shared_experts")
    layers = decoder(dims, [*before, *mlp(dims)], [*before, *routed, *shared])
    yield from renamed(layers, {"gate.e_score_correction_bias": "e_score_correction_bias"})
    indexer = [
        same("q_proj.weight", "q_proj.weight", dims.index_heads * dims.index_dim, dims.hidden),
        same("k_proj.weight", "k_proj.weight", dims.index_dim, dims.hidden),
        *(same(f"{each}_norm.weight", f"{each}_norm.weight", dims.index_dim) for each in "qk"),
    ]
    if dims.indexed:
        indexers = under(
            "model.layers.{layer}.self_attn", "lightning_indexers.{layer}", indexer, dims.indexed
        )
        yield from renamed(indexers, {"self_attn.": "self_attn.index_"})


class SparseLayers(ConfigEntry):
    """Layers with experts and layers with an indexer, listed by words, or as published by 0 and 1."""

    def to_args(self, config: Config) -> Values:
        layers, sparse = (
            range(config.get("num_hidden_layers", 0)),
            config.get("sparse_attention_config") or {},
        )
        experts, indexed = config.get("mlp_layer_types"), config.get("layer_types")
        own = (
            [kind == "sparse" for kind in experts]
            if experts
            else config.get("moe_layer_freq") or [1 for _ in layers]
        )
        chosen = sparse.get("sparse_attention_freq") or ()
        chosen = [kind == "minimax_m3_sparse" for kind in indexed] if indexed else chosen
        return {
            "moe_layer_freq": [int(each) for each in own],
            "lightning_indexer_layers": [layer for layer, each in enumerate(chosen) if each],
            "index_n_heads": first(sparse, ("sparse_num_index_heads",), config.get("index_n_heads", 4)),
            "index_head_dim": first(sparse, ("sparse_index_dim",), config.get("index_head_dim", 128)),
        }

    def to_config(self, args: Args) -> Values:
        layers, indexed = args.get("num_layers", 0), args.get("lightning_indexer_layers") or ()
        experts = sparse_layers(first(args, ("moe_layer_freq",), 1), layers)
        return {
            "mlp_layer_types": ["sparse" if layer in experts else "dense" for layer in range(layers)],
            "layer_types": [
                "minimax_m3_sparse" if layer in indexed else "full_attention" for layer in range(layers)
            ],
            "index_n_heads": args.get("index_n_heads"),
            "index_head_dim": args.get("index_head_dim"),
        }

    def notices(self, config: Config) -> Iterator[str]:
        sparse = config.get("sparse_attention_config") or {}
        blocks = first(sparse, ("sparse_topk_blocks",), config.get("index_topk_blocks", 16))
        size = first(sparse, ("sparse_block_size",), config.get("index_block_size", 128))
        yield f"sparse attention beyond {blocks * size} tokens; Megatron-Bridge computes full attention"


MINIMAX_M3 = Family(
    "minimax_m3_vl",
    "MiniMaxM3SparseForConditionalGeneration",
    rules,
    (
        *GROUPED_HEADS,
        RotaryDim(default_theta=5000000.0, fraction=0.5),
        NO_BIAS,
        QK_NORM,
        Const(args={"apply_layernorm_1p": True}),
        Const(computed={"use_gemma_norm": True, "use_qk_norm": True}),
        Activation(
            args={"swiglu": False, "squared_relu": False, "quick_geglu": True, "glu_linear_offset": 1.0},
            computed={"swiglu_alpha": 1.702},
        ),
        Key("swiglu_limit", "activation_func_clamp_value", default=7.0),
        Key("dense_intermediate_size", "ffn_hidden_size", default=12288),
        Key("intermediate_size", "moe_ffn_hidden_size", default=3072),
        Key("shared_intermediate_size", "moe_shared_expert_intermediate_size", default=3072),
        Key("num_local_experts", "num_experts", aliases=("num_experts",), default=128),
        Key("num_experts_per_tok", "moe_router_topk", default=4),
        Key("routed_scaling_factor", "moe_router_topk_scaling_factor", default=2.0, assumed=1.0),
        SparseLayers(),
        Const(
            args={
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_dtype": "fp32",
            }
        ),
        SigmoidNorm(),
    ),
    computed_by=MEGATRON_BRIDGE,
    live=by_transformers("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration"),
    within=OuterModel(
        hub=(("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
        carried=(
            CarriedTensors("vision_tower.", "vision_tower."),
            CarriedTensors("multi_modal_projector.", "multi_modal_projector."),
            CarriedTensors("patch_merge_mlp.", "patch_merge_mlp."),
        ),
    ),
    judged=(MEGATRON_BRIDGE,),
)
