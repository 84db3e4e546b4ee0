"""Whose names the weights in a message have: programs call the same tensors differently."""

from __future__ import annotations

import re
from collections.abc import Iterable

_CONVENTIONS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (
            "meta",
            r"^tok_embeddings\.weight$|^layers\.\d+\.(?:attention\.w[qkvo]|feed_forward\.w[123]|ffn_norm)\b",
        ),
        (
            "megatron",
            r"^(?:module\.|model\.)*(?:decoder\.layers\.(?:\d+\.)?(?:self_attention\.linear_|mlp\.(?:linear_fc|experts\.))"
            r"|embedding\.word_embeddings\b|language_model\.(?:encoder|embedding)\.)",
        ),
        ("internevo", r"^(?:model\.)?layers\.\d+\.attention\.wqkv\b"),
        ("gguf", r"^blk\.\d+\.(?:attn|ffn)_|^token_embd\."),
        (
            "huggingface",
            r"^(?:model\.)?(?:layers\.\d+\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)|embed_tokens)\b",
        ),
    )
)
"""Programs, and names that only their weights have: Meta's Llama (torchtitan's are the same), Megatron-Core and its
legacy format, InternEvo, llama.cpp, transformers."""


def convention_of(names: Iterable[str]) -> str | None:
    """Whose names these are; None if no program is known by any of them."""
    listed = list(names)
    return next((kind for kind, pattern in _CONVENTIONS if any(map(pattern.search, listed))), None)
