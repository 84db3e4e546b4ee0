"""What llama.cpp computes differently from a config, without a trace in a GGUF file, and models that it does not load.

Source: `src/models/` and `src/llama-model.cpp` of llama.cpp, as in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reshard.base.errors import Problem
from reshard.families.dims import Dims
from reshard.formats.gguf.hyperparameters import ARCHITECTURES, completed, model_type, ropes

Config = Mapping[str, Any]

KNOWN_ROPES = ("default", "linear", "yarn")
DEFAULT_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
"""What llama.cpp assumes for Gemma 2 if a file has no caps."""
LAYERS_WITHOUT_QUERY_LORA = (26, 27)
"""Layers of the DeepSeek models whose queries llama.cpp loads without `q_lora_rank`."""
FULL_ATTENTION_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2}
"""Of so many layers, the last has full attention."""
ROPELESS_EVERY = 4
"""Of so many layers of SmolLM3, the last has no rotary embedding."""
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62, "gemma3_text": 62}
"""Layers of the models of 27 billion parameters, by which llama.cpp recognizes them."""


def _all(config: Config) -> Iterator[tuple[str, object, object]]:
    has_divisors = ARCHITECTURES[config["model_type"]] == "llama"
    for rope in ropes(config):
        kind = rope.get("rope_type", "default")
        if kind not in KNOWN_ROPES and not (kind == "llama3" and has_divisors):
            yield "rope_type", kind, "default"
    part = ropes(config)[0].get("partial_rotary_factor")
    if part not in (None, 1, 1.0) and config["model_type"] != "minimax_m2":
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


def _gemma2(config: Config) -> Iterator[tuple[str, object, object]]:
    yield from _gemma(config)
    for key, default in DEFAULT_CAPS.items():
        if not config.get(key):
            yield key, config.get(key), default


def _gemma3(config: Config) -> Iterator[tuple[str, object, object]]:
    yield from _gemma(config)
    if cap := config.get("attn_logit_softcapping"):
        yield "attn_logit_softcapping", cap, None


def _qwen3_moe(config: Config) -> Iterator[tuple[str, object, object]]:
    yield from _windows(config)
    if not config.get("norm_topk_prob", False):
        yield "norm_topk_prob", False, True


def _qwen2_moe(config: Config) -> Iterator[tuple[str, object, object]]:
    yield from _windows(config)
    if config.get("norm_topk_prob", False):
        yield "norm_topk_prob", True, False


def _olmoe(config: Config) -> Iterator[tuple[str, object, object]]:
    for key, fixed in (("norm_topk_prob", False), ("clip_qkv", None), ("rms_norm_eps", 1e-5)):
        if config.get(key, fixed) != fixed:
            yield key, config[key], fixed


def _smollm3(config: Config) -> Iterator[tuple[str, object, object]]:
    yield from _windows(config)
    fixed = [int((layer + 1) % ROPELESS_EVERY > 0) for layer in range(config["num_hidden_layers"])]
    every = config.get("no_rope_layer_interval", ROPELESS_EVERY)
    stated = config.get("no_rope_layers") or [int((layer + 1) % every > 0) for layer in range(len(fixed))]
    if stated != fixed:
        yield "no_rope_layers", stated, fixed


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
    "qwen2_moe": _qwen2_moe,
    "olmoe": _olmoe,
    "smollm3": _smollm3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
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


def _not_loaded(family: str, config: Config, dims: Dims) -> Iterator[tuple[str, object, object]]:
    """Settings with which llama.cpp's loader ends, each with what it needs instead."""
    if family in ("gemma", "gemma2") and not dims.tied:
        yield "tie_word_embeddings", False, True
    if family == "gpt_oss" and dims.tied:
        yield "tie_word_embeddings", True, False
    if family == "olmoe" and dims.groups != dims.heads:
        yield "num_key_value_heads", dims.groups, f"{dims.heads}, as many as num_attention_heads"
    if family == "qwen2" and dims.heads * dims.head_dim != dims.hidden:
        yield "head_dim", dims.head_dim, f"{dims.hidden} / {dims.heads}, hidden_size over num_attention_heads"
    if family in ("qwen2_moe", "qwen3_moe") and len(dims.sparse) != dims.layers:
        dense = sorted({*range(dims.layers)} - {*dims.sparse})
        yield (
            "mlp_only_layers or decoder_sparse_step",
            f"no experts in layers {dense}",
            "experts in every layer",
        )
    if family == "deepseek_v3":
        yield from _deepseek_not_loaded(completed(config), dims)


def _deepseek_not_loaded(config: Config, dims: Dims) -> Iterator[tuple[str, object, object]]:
    if not dims.q_lora and dims.layers not in LAYERS_WITHOUT_QUERY_LORA:
        yield "q_lora_rank", None, "a rank"
    groups, chosen = config["n_group"], config["topk_group"]
    if groups >= dims.experts:
        yield "n_group", groups, f"fewer groups than the {dims.experts} experts"
    if 1 < groups <= chosen:
        yield "topk_group", chosen, f"fewer than the {groups} groups of n_group"


def not_loaded(config: Config, dims: Dims) -> list[Problem]:
    """A problem for each setting of a model that llama.cpp's loader does not accept."""
    return [
        Problem(
            "gguf-not-loadable",
            f"llama.cpp cannot load a model with this {key}",
            file="config.json",
            expected=str(needed),
            found=str(stated),
            remedy="choose another format: --to huggingface",
        )
        for key, stated, needed in _not_loaded(model_type(config), config, dims)
    ]
