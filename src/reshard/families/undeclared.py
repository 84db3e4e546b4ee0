"""Models of the Hub that are not declared, and why.

Formats that keep the Hub's names need no declaration of them. The first table says what is beyond megatron-core 0.19.2,
and beyond the modules of mcore-bridge 1.6.5 and Megatron-Bridge 0.6.2 that can be built with it. Sources:
`TransformerConfig` and `TransformerLayer` of megatron-core; `model/` of mcore-bridge, `models/` of Megatron-Bridge.
"""

BEYOND_MEGATRON: dict[str, str] = {
    "afmoe": "norms after attention and MLP; megatron-core 0.19.2 has no such setting",
    "cohere": "attention and MLP side by side; megatron-core 0.19.2 has no such setting",
    "cohere2": "attention and MLP side by side; megatron-core 0.19.2 has no such setting",
    "deepseek_v41": "compressed attention of a later kind, and n-gram embeddings, for which mcore-bridge needs a "
    "branch of megatron-core later than any release up to 0.19.2",
    "glm5_next": "Kimi delta attention and hyper-connections, for which mcore-bridge needs a patched branch of "
    "megatron-core later than any release up to 0.19.2",
    "kimi_linear": "Kimi delta attention, which no release of megatron-core up to 0.19.2 has",
    "longcat_flash": "two attentions in a layer, with experts beside them, which megatron-core 0.19.2 has no layer for",
    "mistral4": "queries scaled by their position; megatron-core 0.19.2 has no such setting",
    "exaone4_5": "EXAONE 4 behind a vision tower; not declared for Megatron-Bridge",
    "exaone_moe": "experts behind EXAONE 4's windows; not declared for Megatron-Bridge",
    "gemma4_unified": "Gemma 4 with another tower, which Megatron-Bridge lacks; mcore-bridge loads it, and cannot save "
    "layers of several shapes",
    "nemotron-nas": "layers of different sizes, some without attention or MLP; not declared for Megatron-Bridge",
    "olmo2": "post-norm instead of pre-norm",
    "olmo3": "norms after attention and MLP instead of before; megatron-core 0.19.2 has no such setting",
    "qwen3_asr": "Qwen3 behind an audio tower from a separate package; not declared for mcore-bridge",
    "step3p7": "Step-3.5 behind a vision tower; not declared for Megatron-Bridge",
}
"""Reasons, by the `model_type` of config.json."""

BUILT_ALIKE: dict[str, str] = {
    "granite": "residuals are multiplied by a constant, for which megatron-core 0.19.2 has no setting, and so are "
    "embeddings, attention scores and logits",
    "mellum": "some layers attend to a window of tokens, and two rotary bases alternate",
    "ministral": "some layers attend to a window of tokens",
    "ministral3": "queries are scaled by their position beyond the original context",
}
"""Models with the names and shapes of a declared family that compute something else, and what that is."""
