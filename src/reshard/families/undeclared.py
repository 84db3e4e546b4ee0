"""Families of the hub that Megatron-Core's GPT model does not compute, so that there is nothing to declare.

Their names are the hub's in every format that keeps them, and need no declaration there. The table says what is beyond
the options of GPTModel in megatron-core 0.16.1; Megatron-Bridge has modules of its own for some of them.
"""

from __future__ import annotations

BEYOND_MEGATRON: dict[str, str] = {
    "ernie4_5_moe": "the router adds a bias to softmax scores; Megatron-Core knows one for sigmoid scores only",
    "gemma": "embeddings are multiplied by the square root of the hidden size",
    "gemma2": "what attention and MLP return is normalised, and logits are capped",
    "gemma3": "what attention and MLP return is normalised, and two rotary bases alternate",
    "gemma3_text": "what attention and MLP return is normalised, and two rotary bases alternate",
    "glm4": "what attention and MLP return is normalised",
    "minimax_m2": "queries are normalised over all heads at once; Megatron-Core normalises each head",
    "olmo2": "what attention and MLP return is normalised, and what they take in is not",
    "olmoe": "queries are normalised over all heads at once; Megatron-Core normalises each head",
    "qwen3_next": "Megatron-Core stores the norm inside linear attention less one, which no re-indexing gives",
}
"""Why, by the `model_type` of config.json."""

BUILT_ALIKE: dict[str, str] = {
    "granite": "embeddings, residuals, attention scores and logits are multiplied by constants",
    "mellum": "some layers attend to a window of tokens, and two rotary bases alternate",
    "ministral": "some layers attend to a window of tokens",
    "ministral3": "queries are scaled by their position beyond the original context",
}
"""Models with the names and shapes of a declared family that compute something else, and what."""
