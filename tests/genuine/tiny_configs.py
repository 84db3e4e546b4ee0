"""Small configs, in the spelling of transformers 5: the common parts of the model types of `model_types`."""

from __future__ import annotations

from typing import Any

from tests.genuine.huggingface import (
    COMMON,
    DEEPSEEK_V3,
    DELTA,
    EXPERTS,
    GLM4_MOE,
    PLAIN_ROPE,
    WIDE_HEADS,
)

TEXT: dict[str, Any] = {key: value for key, value in COMMON.items() if not key.endswith("_token_id")}
EVEN = {**TEXT, "vocab_size": 288}
"""Megatron-Bridge does not pad a vocabulary that it loads from the Hub."""
MROPE = {**PLAIN_ROPE, "rope_type": "default", "mrope_section": [2, 1, 1]}
SEES = {
    "image_token_id": 280,
    "video_token_id": 281,
    "vision_start_token_id": 278,
    "vision_end_token_id": 279,
}
QWEN2_VISION = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN3_VISION = {
    **QWEN2_VISION,
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
QWEN3_TEXT = {
    **TEXT,
    **WIDE_HEADS,
    "rope_parameters": {**PLAIN_ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
}
DELTA_TEXT = {
    **TEXT,
    **DELTA,
    "rope_parameters": {**DELTA["rope_parameters"], "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}
DELTA_MOE = {
    **{key: value for key, value in DELTA_TEXT.items() if key != "intermediate_size"},
    **EXPERTS,
    "num_experts": 4,
    "shared_expert_intermediate_size": 40,
}
DELTA_VISION = {key: value for key, value in QWEN3_VISION.items() if key != "deepstack_visual_indexes"}
STEP = {**EVEN, "num_hidden_layers": 4, "head_dim": 16}
# Of 12 tokens, each attends to those that the indexer chooses. Two layers embed n-grams.
QWEN4 = {
    **DELTA_MOE,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "hc_count": 2,
    "hc_lowrank": 8,
    "ple_layer_ids": [2, 3],
    "ple_embed_dim": 32,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 20,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 3,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
    "eos_token_id": 3,
}
PARTIAL_ROPE = {**PLAIN_ROPE, "partial_rotary_factor": 0.5}
# What transformers 5 does not know of it, it keeps and saves, as the Hub has it.
MINIMAX_M2 = {
    **COMMON,
    **WIDE_HEADS,
    "intermediate_size": 24,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "scoring_func": "sigmoid",
    "rotary_dim": 8,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
}
LATENT = {**COMMON, **DEEPSEEK_V3, "q_lora_rank": 24, "n_routed_experts": 4}
# Of 12 tokens, each attends to those that the indexer chooses.
DSA = {**LATENT, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8}
ERNIE_MOE = {
    **COMMON,
    "moe_intermediate_size": 24,
    "moe_k": 2,
    "moe_num_experts": 4,
    "moe_num_shared_experts": 2,
}
GLM_VISION = {
    **QWEN2_VISION,
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": 64,
    "image_size": 16,
}
GLM_TEXT = {**TEXT, "attention_bias": True, "rope_parameters": {**PARTIAL_ROPE, "mrope_section": [2, 1, 1]}}
KIMI_VISION = {
    "patch_size": 4,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
KIMI = {
    "text_config": {**TEXT, **LATENT, "model_type": "deepseek_v3"},
    "vision_config": KIMI_VISION,
    "projection_hidden_size": 16,
    "tie_word_embeddings": False,
    "image_token_id": 280,
    "video_token_id": 281,
}
PLAIN_GLM = {**COMMON, **GLM4_MOE, "num_nextn_predict_layers": 0, "n_routed_experts": 4}
SPARSE = {**EXPERTS, "moe_intermediate_size": 24, "num_experts": 4, "norm_topk_prob": True}
GEMMA = {**EVEN, **WIDE_HEADS, "tie_word_embeddings": True}
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 500000.0, "factor": 8.0},
}
GEMMA3 = {
    **GEMMA,
    "num_hidden_layers": 6,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "rope_parameters": GEMMA3_ROPE,
}
MINIMAX_M3_TEXT = {
    **EVEN,
    **WIDE_HEADS,
    "intermediate_size": 24,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 40,
    "rotary_dim": 8,
    "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.5},
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse"],
    "index_n_heads": 2,
    "index_head_dim": 8,
}
MINIMAX_M3_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
GEMMA4 = {
    **GEMMA,
    "vocab_size": 384,  # Megatron-Bridge pads it to a multiple of 128, in its model of this family
    "vocab_size_per_layer_input": 384,
    "hidden_size_per_layer_input": 8,
    "num_hidden_layers": 6,
    "num_key_value_heads": 4,
    "global_head_dim": 32,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 500000.0,
            "partial_rotary_factor": 0.5,
        },
    },
}
GEMMA4_SHARING = {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
GEMMA4_MOE = {
    **GEMMA4,
    "hidden_size_per_layer_input": 0,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
GEMMA4_UNIFIED = {
    **{key: value for key, value in GEMMA4.items() if not key.endswith("per_layer_input")},
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
}
GEMMA4_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
    "pooling_kernel_size": 2,
}
GEMMA4_AUDIO = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "output_proj_dims": 24,
    "subsampling_conv_channels": [8, 4],
    "conv_kernel_size": 3,
}
GEMMA4_TOKENS = {
    "image_token_id": 280,
    "video_token_id": 281,
    "audio_token_id": 282,
    "boi_token_id": 276,
    "eoi_token_id": 277,
    "boa_token_id": 278,
    "eoa_token_id": 279,
}
GEMMA3_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "vision_use_head": False,
}

DEEPSEEK_V4: dict[str, Any] = {
    "vocab_size": 283,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": [
        "sliding_attention",
        *("heavily_compressed_attention", "compressed_sparse_attention") * 2,
    ],
    "num_hash_layers": 2,
    "sliding_window": 8,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 4,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 512,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
MIMO_V2_FLASH: dict[str, Any] = {
    "vocab_size": 283,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
}
