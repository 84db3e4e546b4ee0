"""What llama.cpp computes differently from a config, without a trace in a GGUF file.

Source: `src/models/` of llama.cpp, as in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reshard.base.errors import Problem
from reshard.formats.gguf.hyperparameters import completed, model_type, ropes

Config = Mapping[str, Any]

KNOWN_ROPES = ("default", "linear", "yarn", "llama3", "proportional")
FULL_ATTENTION_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2}
"""Of so many layers, the last has full attention."""
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62, "gemma3_text": 62}
"""Layers of the models of 27 billion parameters, by which llama.cpp recognizes them."""


def _all(config: Config) -> Iterator[tuple[str, object, object]]:
    for rope in ropes(config):
        kind = rope.get("rope_type", "default")
        if kind not in KNOWN_ROPES:
            yield "rope_type", kind, "default"
    part = ropes(config)[0].get("partial_rotary_factor")
    if part not in (None, 1, 1.0):
        yield "partial_rotary_factor", part, 1.0
    is_gemma = str(config["model_type"]).startswith("gemma")
    used = "gelu_pytorch_tanh" if is_gemma else "silu"
    # transformers computes the same function of the first Gemma whatever the config says.
    keys = () if config["model_type"] == "gemma" else ("hidden_act", "hidden_activation")
    for key in keys:
        if config.get(key) not in (None, used):
            yield key, config[key], used


def _windows(config: Config) -> Iterator[tuple[str, object, object]]:
    """llama.cpp computes windows of Gemma and gpt-oss only, in fixed layers."""
    window, most = config.get("sliding_window"), config.get("max_position_embeddings")
    if (
        config.get("use_sliding_window", config["model_type"] == "mistral")
        and window
        and window < (most or 0)
    ):
        yield "sliding_window", window, None


def _pattern(config: Config) -> Iterator[tuple[str, object, object]]:
    every = FULL_ATTENTION_EVERY[config["model_type"]]
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        stated = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or every
        kinds = [
            "full_attention" if (i + 1) % stated == 0 else "" for i in range(config["num_hidden_layers"])
        ]
    full = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    fixed = list(range(every - 1, len(kinds), every))
    if full != fixed:
        yield "layer_types", f"full attention in layers {full}", f"full attention in layers {fixed}"


def _gemma(config: Config) -> Iterator[tuple[str, object, object]]:
    yield from _pattern(config)
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == LAYERS_OF_27B[config["model_type"]]:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    if config.get("query_pre_attn_scalar", 256) != scalar:
        yield "query_pre_attn_scalar", config.get("query_pre_attn_scalar", 256), scalar


def _qwen3_moe(config: Config) -> Iterator[tuple[str, object, object]]:
    yield from _windows(config)
    if not config.get("norm_topk_prob", False):
        yield "norm_topk_prob", False, True


def _gpt_oss(config: Config) -> Iterator[tuple[str, object, object]]:
    yield from _pattern(config)
    for key, fixed in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if config.get(key, fixed) != fixed:
            yield key, config[key], fixed


_OWN = {
    "mistral": _windows,
    "qwen2": _windows,
    "qwen3": _windows,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _windows,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "gemma3_text": _gemma,
    "gpt_oss": _gpt_oss,
}


def differences(config: Config) -> Iterator[Problem]:
    """A warning for each key of the config that llama.cpp has another value for."""
    whole, family = completed(config), model_type(config)
    whole["model_type"] = family
    own = _OWN[family](whole) if family in _OWN else ()
    for key, stated, fixed in (*_all(whole), *own):
        yield Problem(
            "gguf-computed-differently",
            f"llama.cpp computes {key} differently from the config",
            file="config.json",
            expected=str(stated),
            found=str(fixed),
            remedy="compare logits before you use the file",
            severity="warning",
        )
