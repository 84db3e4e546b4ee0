"""Random small models of the types that a bridge supports, each in a random layout, for its judgement.

A seed decides all: which sizes the model has, which of the options that its config knows, and how many tensor, pipeline
and expert parallel ranks its checkpoint is for.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.genuine.huggingface import (
    ALIASES,
    COMMON,
    LLAMA3_ROPE,
    PLAIN_ROPE,
    VARIANTS,
    YARN,
    make_model,
)
from tests.genuine.model_types import TYPES, make_model_type

Choices = dict[str, Sequence[Any]]

EITHER = (False, True)
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0}
ROPES = (PLAIN_ROPE, LINEAR_ROPE, YARN, LLAMA3_ROPE)
ALL_DENSE_OR_SPARSE: Choices = {"first_k_dense_replace": (0, 1, 2)}
SHARED: Choices = {"n_shared_experts": (1, 2, 3)}
LATENT: Choices = {
    **ALL_DENSE_OR_SPARSE,
    **SHARED,
    "q_lora_rank": (None, 16, 24),
    "kv_lora_rank": (8, 16, 24),
    "qk_nope_head_dim": (8, 16),
    "qk_rope_head_dim": (4, 8),
    "v_head_dim": (8, 12, 16),
}
SHARED_WIDTH: Choices = {"shared_expert_intermediate_size": (24, 40, 80)}
PREDICTED: Choices = {"num_nextn_predict_layers": (0, 1, 2)}
TIED: Choices = {"tie_word_embeddings": EITHER}
DELTA: Choices = {
    "linear_num_key_heads": (2, 4),
    "linear_num_value_heads": (4, 8),
    "linear_key_head_dim": (4, 8),
    "linear_value_head_dim": (4, 8, 12),
}
OPTIONS: dict[str, Choices] = {
    "llama": {**TIED, "rope_parameters": ROPES},
    "qwen2": {**TIED, "rope_parameters": ROPES[:3]},
    "qwen3": {**TIED, "rope_parameters": ROPES[:3]},
    "qwen2_moe": {**SHARED_WIDTH, **TIED, "qkv_bias": EITHER},
    "qwen3_moe": {**TIED, "rope_parameters": ROPES[:3]},
    "ernie4_5": TIED,
    "deepseek_v2": LATENT,
    "deepseek_v3": {**LATENT, **PREDICTED, "rope_parameters": (PLAIN_ROPE, YARN)},
    "deepseek_v32": {**LATENT, "q_lora_rank": (16, 24), **PREDICTED},
    "glm_moe_dsa": {**LATENT, "q_lora_rank": (16, 24)},
    "glm4_moe": {
        **ALL_DENSE_OR_SPARSE,
        **SHARED,
        **PREDICTED,
        "attention_bias": EITHER,
        "use_qk_norm": EITHER,
    },
    "glm4_moe_lite": {**LATENT, "q_lora_rank": (16, 24), **PREDICTED},
    "kimi_k2": LATENT,
    "dots1": {**ALL_DENSE_OR_SPARSE, **SHARED},
    "hy_v3": {**ALL_DENSE_OR_SPARSE, "num_shared_experts": (1, 2)},
    "qwen3_next": {**SHARED_WIDTH, **DELTA, "num_nextn_predict_layers": (0, 1)},
    "qwen3_5": DELTA,
    "qwen3_5_moe": {**SHARED_WIDTH, **DELTA},
    "deepseek": {**ALL_DENSE_OR_SPARSE, **SHARED},
    "bailing_moe": {**ALL_DENSE_OR_SPARSE, **SHARED, **PREDICTED},
    "ernie4_5_moe": {"moe_num_shared_experts": (1, 2), "moe_layer_start_index": (0, 1)},
    "gemma2": {"query_pre_attn_scalar": (16, 24)},
    "mimo": {"num_nextn_predict_layers": (0, 1, 2)},
    "nemotron": TIED,
}
TOWERS: Choices = {"depth": (2, 3), "num_hidden_layers": (1, 2), "intermediate_size": (16, 24, 40)}
FIXED_DEPTH = ("layer_types", "hybrid_override_pattern", "no_rope_layers")
"""Settings that say something of each layer."""
DEPTH_OF_HUB_NAMES = ("glm_moe_dsa", "gemma3_text", "gemma3", "llama4")
"""Types whose edits for the Hub, or whose patterns of layers, are for the number of layers that they have."""
LISTS_SPARSE_LAYERS = ("deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "hy_v3")
"""Types of which transformers builds the layers that `mlp_layer_types` lists."""
PUBLISHED_HEADS = ("mistral3", "ministral3")
"""Types whose sizes Megatron-Bridge takes for granted."""
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
LAYOUTS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 1, 1))
SPARSE_LAYOUTS = (*LAYOUTS, (2, 1, 2), (2, 2, 2), (4, 1, 4))


@dataclass(frozen=True)
class Bridge:
    """A peer, and what it builds: `names` of model types, sizes of vocabularies, and `options` that replace `OPTIONS`.

    The `module` runs it in an `environment`. It looks for weights in the folder `within` what reshard writes for its
    `engine`. From MTP layers, it may not export `copies` of the embedding and the head.
    """

    engine: str
    module: str
    environment: str
    names: Sequence[str]
    vocabularies: Sequence[int]
    options: Mapping[str, Choices] = field(default_factory=dict)
    on_one_tensor_rank: Sequence[str] = ()
    within: str = ""
    copies: bool = True


@dataclass(frozen=True)
class RandomModel:
    """A model type with the settings of its config, and the TP, PP and EP sizes of its checkpoint."""

    name: str
    seed: int
    settings: dict[str, Any]
    layout: tuple[int, int, int]

    def make(self, folder: Path) -> Path:
        """Write it to a Hugging Face folder."""
        if self.name in TYPES:
            return make_model_type(self.name, folder, seed=self.seed, **self.settings)
        return make_model(self.name, folder, dtype="bfloat16", seed=self.seed, **self.settings)


def random_model(name: str, seed: int, bridge: Bridge) -> RandomModel:
    """The model of type `name` of this seed, which the bridge can build."""
    draw = random.Random(f"{name} {seed}")
    settings = _settings_of(name)
    text = language_part(settings)
    hidden = text["hidden_size"]
    if name not in PUBLISHED_HEADS:
        _draw_sizes(name, text, draw)
    text["vocab_size"] = draw.choice(bridge.vocabularies)
    for key, choices in {**OPTIONS.get(name, {}), **bridge.options.get(name, {})}.items():
        text[key] = copy.deepcopy(draw.choice(choices))
    _agree_on_sparse_layers(name, text)
    if text.get("rope_parameters", {}).get("rope_type") == "llama3":
        text["max_position_embeddings"] = 65536
    if "tie_word_embeddings" in settings:
        settings["tie_word_embeddings"] = text["tie_word_embeddings"]
    _draw_towers(settings, text, hidden, draw)
    return RandomModel(name, seed, settings, draw.choice(_layouts(text, name in bridge.on_one_tensor_rank)))


def _layouts(text: dict[str, Any], on_one_tensor_rank: bool) -> list[tuple[int, int, int]]:
    """The layouts of which each rank has heads, and each stage as many layers."""
    sparse = any(key in text for key in EXPERTS)
    heads = [text[key] for key in ("num_key_value_heads", "linear_num_key_heads", "n_groups") if key in text]
    heads += [1] if on_one_tensor_rank else []
    return [
        (tp, pp, ep)
        for tp, pp, ep in (SPARSE_LAYOUTS if sparse else LAYOUTS)
        if all(count % tp == 0 for count in heads) and _depth(text) % pp == 0
    ]


def _agree_on_sparse_layers(name: str, text: dict[str, Any]) -> None:
    """Leave one layer with experts, and say which in all the ways that configs of the type have."""
    for key in ("first_k_dense_replace", "moe_layer_start_index"):
        if key in text:
            layers = text["num_hidden_layers"]
            dense = text[key] = min(text[key], layers - 1)
            sparse = layers - dense + text.get("num_nextn_predict_layers", 0)
            if name in LISTS_SPARSE_LAYERS:
                text["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * sparse


def _settings_of(name: str) -> dict[str, Any]:
    if name in TYPES:
        return copy.deepcopy(dict(TYPES[name].settings))
    return copy.deepcopy({**COMMON, **{**VARIANTS, **ALIASES}[name][1]})


def language_part(settings: dict[str, Any]) -> dict[str, Any]:
    """The config of the language model in a config."""
    if "vocab_size" in settings:
        return settings
    inner = [language_part(value) for value in settings.values() if isinstance(value, dict)]
    return next((part for part in inner if part), {})


def _depth(text: dict[str, Any]) -> int:
    return len(text.get("hybrid_override_pattern", "")) or int(text["num_hidden_layers"])


def _draw_sizes(name: str, text: dict[str, Any], draw: random.Random) -> None:
    fixed = "mrope_section" in str(text) or "rotary_dim" in text
    if name not in DEPTH_OF_HUB_NAMES and not any(key in text for key in FIXED_DEPTH):
        text["num_hidden_layers"] = draw.randint(2, 4)
    groups = draw.choice((1, 2, 4))
    equal = text["num_attention_heads"] == text["num_key_value_heads"]
    text["num_attention_heads"] = groups * draw.choice((1, 2, 3) if groups > 1 else (2, 4))
    text["num_key_value_heads"] = text["num_attention_heads"] if equal else groups
    if "head_dim" in text:
        text["head_dim"] = text["head_dim"] if fixed else draw.choice((8, 16, 24))
        text["hidden_size"] = text["num_attention_heads"] * draw.choice((4, 8, 12))
    else:
        text["hidden_size"] = 8 * text["num_attention_heads"]
    for key in ("intermediate_size", "moe_intermediate_size"):
        if key in text:
            # Megatron-Bridge tells by their shape whether stacked experts are transposed, which no square does.
            text[key] = draw.choice([width for width in (24, 32, 56, 96) if 2 * width != text["hidden_size"]])
    for key in EXPERTS:
        if key in text:
            text[key] = draw.choice((4, 8))
    if "rms_norm_eps" in text:
        text["rms_norm_eps"] = draw.choice((1e-5, 1e-6))


def _draw_towers(settings: dict[str, Any], text: dict[str, Any], hidden: int, draw: random.Random) -> None:
    """Draw the sizes of towers. They end in the width of the language model, which was `hidden`."""
    for key in ("out_hidden_size", "output_dim"):
        if settings is not text and settings.get(key) == hidden:
            settings[key] = text["hidden_size"]
    for tower in settings.values():
        if not isinstance(tower, dict) or tower is text:
            continue
        if tower.get("hidden_size") == hidden:  # Qwen2-VL calls the width of its output so
            tower["hidden_size"] = text["hidden_size"]
        for key, choices in TOWERS.items():
            if key in tower and "projector_input_dim" not in tower:
                tower[key] = draw.choice(choices)
        _draw_towers(tower, text, hidden, draw)
