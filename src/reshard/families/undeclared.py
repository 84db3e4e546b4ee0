"""Models of the Hub that are not declared, and why.

Formats that keep the Hub's names need no declaration of them. The first table says what is
beyond megatron-core 0.16.1, and which modules of mcore-bridge 1.6.5 and Megatron-Bridge 0.6.2 are not declared.
Sources: `model/` of mcore-bridge, `models/` of Megatron-Bridge.
"""

from __future__ import annotations

BEYOND_MEGATRON: dict[str, str] = {
    "bailing_hybrid": "linear attention with per-head decay; mcore-bridge's module for it needs a GPU",
    "deepseek_v4": "compressed attention and hyper-connections, which megatron-core supports after 0.16.1",
    "deepseek_v41": "compressed attention and hyper-connections, which megatron-core supports after 0.16.1",
    "exaone4_5": "EXAONE 4 behind a vision tower; not declared for Megatron-Bridge",
    "exaone_moe": "experts behind EXAONE 4's windows; not declared for Megatron-Bridge",
    "gemma4_unified": "Gemma 4 with another tower, which Megatron-Bridge lacks; not declared for mcore-bridge",
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
