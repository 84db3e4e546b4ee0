"""Models of the Hub that are not declared: why, and how their names in memory differ.

Formats that keep the Hub's names need no declaration of them. The first table says what is
beyond megatron-core 0.16.1, and beyond the modules of mcore-bridge 1.6.5 and Megatron-Bridge 0.3.1 that can be built
with it. Sources: `model/` of mcore-bridge, `models/` of Megatron-Bridge.
"""

from __future__ import annotations

from reshard.families.live import BLOCK_SPARSE, W132, Experts, Live

BEYOND_MEGATRON: dict[str, str] = {
    "bailing_hybrid": "linear attention with per-head decay; mcore-bridge's module for it needs a GPU",
    "deepseek_v4": "compressed attention and hyper-connections, which megatron-core supports after 0.16.1",
    "deepseek_v41": "compressed attention and hyper-connections, which megatron-core supports after 0.16.1",
    "gemma4": "layers that share keys and values, and per-layer embeddings; not declared for mcore-bridge",
    "gemma4_unified": "layers that share keys and values, and per-layer embeddings; not declared for mcore-bridge",
    "glm5_next": "hybrid layers, which megatron-core supports after 0.16.1, and a patch of mcore-bridge",
    "nemotron-nas": "layers of different sizes, some without attention or MLP; not declared for Megatron-Bridge",
    "olmo2": "post-norm instead of pre-norm",
    "qwen3_asr": "Qwen3 behind an audio tower from a separate package; not declared for mcore-bridge",
    "qwen4_exp": "hyper-connections and n-gram embeddings; not declared for mcore-bridge",
}
"""Reasons, by the `model_type` of config.json."""

BUILT_ALIKE: dict[str, str] = {
    "granite": "embeddings, residuals, attention scores and logits are multiplied by constants",
    "mellum": "some layers attend to a window of tokens, and two rotary bases alternate",
    "ministral": "some layers attend to a window of tokens",
    "ministral3": "queries are scaled by their position beyond the original context",
}
"""Models with the names and shapes of a declared family that compute something else, and what that is."""

GRANITE = Live(
    None,
    (
        ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
        ("block_sparse_moe.experts.down_proj", "block_sparse_moe.output_linear.weight"),
        ("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight"),
    ),
)
_BIAS = "mlp.gate.e_score_correction_bias"
_PLAIN = (
    *("afmoe", "longcat_flash", "solar_open", "mellum"),
    *("flex_olmo", "cohere2_moe", "hunyuan_v1_moe"),
)

LIVE: dict[str, Live] = {
    **dict.fromkeys(_PLAIN, Live()),
    "minimax": BLOCK_SPARSE,
    "phimoe": Live(W132, ((".mlp.router.", ".mlp.gate."), *BLOCK_SPARSE.renames)),
    "lfm2_moe": Live(Experts("feed_forward.experts", "w1", "w3", "w2")),
    "jamba": Live(Experts("feed_forward.experts")),
    "exaone_moe": Live(renames=((_BIAS, "mlp.e_score_correction_bias"),)),
    "kolibri1": Live(
        renames=(
            (_BIAS, "moe.router.expert_bias"),
            ("post_self_attn_layernorm", "post_attn_norm"),
            ("post_mlp_layernorm", "post_ffn_norm"),
        )
    ),
    "mimo_v2_flash": Live(renames=(("self_attn.sinks", "self_attn.attention_sink_bias"),)),
    "flint": Live(renames=(("self_attn.sinks", "self_attn.softmax_offset"),)),
    "laguna": Live(
        renames=(
            (_BIAS, "mlp.experts.e_score_correction_bias"),
            ("mlp.shared_experts.", "mlp.shared_expert."),
        )
    ),
    "axk1": Live(renames=((".mlp.post_mlp_layernorm.", ".post_mlp_layernorm."),)),
    "axk2": Live(
        renames=(
            ("layernorm.mlp.fc1.", "layernorm.W_down."),
            ("layernorm.mlp.fc2.", "layernorm.W_up."),
            ("self_attn.q_gate_proj.", "self_attn.q_b_proj."),
        )
    ),
    "granitemoe": GRANITE,
    "granitemoeshared": GRANITE,
    "granitemoehybrid": GRANITE,
    "aria_text": Live(
        None,
        (
            ("mlp.experts.gate_up_proj", "mlp.experts.fc1.weight"),
            ("mlp.experts.down_proj", "mlp.experts.fc2.weight"),
        ),
    ),
}
"""Names in memory, by the `model_type` of config.json."""
