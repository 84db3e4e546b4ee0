"""The config.json that the metadata of a GGUF file imply: the inverse of `hyperparameters`.

Metadata do not state everything. What llama.cpp computes in only one way (activations, the layers with windows) is
filled in as it computes it. A Mistral without windows is a Llama.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reshard.families import FAMILIES
from reshard.families.rope import LLAMA3_DEFAULTS
from reshard.formats.gguf.hyperparameters import GATING_FUNCTIONS, GLOBAL, LOCAL
from reshard.formats.gguf.value_types import Value, ValueType

Shapes = Mapping[str, tuple[int, ...]]

CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_used_count": "num_experts_per_tok",
}
LATENT_KEYS = {
    "leading_dense_block_count": "first_k_dense_replace",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
}
CONFIG_KEYS_OF: Mapping[str, Mapping[str, str]] = {
    "mixtral": {"expert_count": "num_local_experts"},
    "gpt_oss": {"expert_count": "num_local_experts"},
    "qwen3_moe": {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"},
    "qwen2_moe": {
        "expert_count": "num_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    "olmoe": {"expert_count": "num_experts"},
    "minimax_m2": {"expert_count": "num_local_experts", "rope.dimension_count": "rotary_dim"},
    "deepseek_v3": LATENT_KEYS,
}
"""The keys of config.json, by those of a GGUF file, in addition to `CONFIG_KEYS`."""
FAMILY_OF_ARCHITECTURE = {
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "qwen2moe": "qwen2_moe",
    "olmoe": "olmoe",
    "smollm3": "smollm3",
    "minimax-m2": "minimax_m2",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss",
}
FULL_ATTENTION_EVERY = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}
"""Of so many layers, the last has full attention."""
NORMALIZES = {"qwen3_moe": True, "qwen2_moe": False, "olmoe": False}
"""Whether the scores of the experts that a router chose are divided by their sum."""
LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
"""Layers of models whose queries are scaled by another size than that of a head."""
ROPE_SCALINGS = ("linear", "yarn")


class _StatedMetadata:
    """The metadata of one architecture, with numbers as short as they were before they were rounded to float32."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = values
        self.arch = str(self.get("general.architecture"))

    def get(self, key: str) -> Any:
        """A single value, or None."""
        entry = self._values.get(key)
        if entry is None or entry.type is ValueType.ARRAY:
            return None
        return float(str(np.float32(entry.value))) if entry.type is ValueType.FLOAT32 else entry.value

    def own(self, key: str) -> Any:
        """A number of the architecture, or None."""
        number = self.get(f"{self.arch}.{key}")
        return number if isinstance(number, int | float) else None

    def size(self, key: str) -> int:
        """A size of the architecture, or 0."""
        number = self.own(key)
        return number if isinstance(number, int) else 0


def _family(stated: _StatedMetadata) -> str | None:
    """The `model_type` of an architecture, or None if there is no family for it."""
    if stated.arch == "llama":
        return "mixtral" if stated.own("expert_count") else "llama"
    if stated.arch == "deepseek2":  # others of this architecture have a softmax
        return "deepseek_v3" if stated.own("expert_gating_func") == GATING_FUNCTIONS["sigmoid"] else None
    return FAMILY_OF_ARCHITECTURE.get(stated.arch)


def config_of(
    values: Mapping[str, Value], shapes: Shapes, divisors: Sequence[float] | None = None
) -> dict[str, Any] | None:
    """A config.json in the keys of transformers 5, or None if the metadata do not determine it.

    `shapes` are those of the tensors by their names in the file, `divisors` the elements of `rope_freqs.weight`.
    """
    stated = _StatedMetadata(values)
    family, rope = _family(stated), _rope(stated, divisors)
    if family is None or rope is None or not _has_sizes(stated, shapes):
        return None
    names = {**CONFIG_KEYS, **CONFIG_KEYS_OF.get(family, {})}
    settings = {name: stated.own(key) for key, name in names.items() if stated.own(key) is not None}
    return {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        **settings,
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_parameters": rope,
        **_specials(stated),
        **_family_keys(family, settings, stated, shapes),
    }


def recorded_by(
    values: Mapping[str, Value], frequencies: Sequence[str], divisors: Sequence[float] | None = None
) -> dict[str, Any]:
    """The keys of config.json that the metadata of any architecture state, without what `config_of` fills in.

    `frequencies` are the tensors that scale the rotary embedding. Latent attention is stored with other heads.
    """
    stated = _StatedMetadata(values)
    latent = stated.own("attention.kv_lora_rank") is not None
    absorbed = ("attention.head_count_kv", "attention.key_length") if latent else ()
    settings = {
        name: stated.own(key)
        for key, name in CONFIG_KEYS.items()
        if stated.own(key) is not None and key not in absorbed
    }
    kind, theta = stated.get(f"{stated.arch}.rope.scaling.type"), stated.own("rope.freq_base")
    rope: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind} if kind else {}
    if kind in ROPE_SCALINGS:
        rope["factor"] = stated.own("rope.scaling.factor")
    if divisors:
        rope = {"rope_type": "llama3", "factor": float(max(divisors))}
    elif frequencies:
        rope = {"rope_type": "longrope"}
    rope |= {} if theta is None else {"rope_theta": theta}
    family = {} if _family(stated) is None else {"model_type": _family(stated)}
    return {**family, **settings, "rope_parameters": rope}


def _has_sizes(stated: _StatedMetadata, shapes: Shapes) -> bool:
    """Whether the sizes are there without which there is no model, and as many layers as they say."""
    needed = ["embedding_length", "attention.head_count"]
    if stated.arch == "deepseek2":
        needed += ["attention.key_length_mla", "rope.dimension_count"]
    layers = stated.size("block_count")
    return (
        all(stated.size(key) > 0 for key in needed)
        and all(shapes.get(name) for name in ("token_embd.weight", f"blk.{layers - 1}.attn_norm.weight"))
        and (stated.arch not in ("gemma2", "gemma3") or stated.size("attention.key_length") > 0)
    )


def _rope(stated: _StatedMetadata, divisors: Sequence[float] | None) -> dict[str, Any] | None:
    """The rotary embedding; None if frequencies are divided in another way than Llama 3's."""
    theta = stated.own("rope.freq_base")
    rope = {"rope_type": "default", "rope_theta": 10000.0 if theta is None else theta}
    kind = stated.get(f"{stated.arch}.rope.scaling.type")
    if kind in ROPE_SCALINGS:
        rope |= {"rope_type": kind, "factor": stated.own("rope.scaling.factor")}
    if kind == "yarn":
        others = {
            "original_max_position_embeddings": "original_context_length",
            "attention_factor": "yarn_attn_factor",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
        }
        scaled = {name: stated.own(f"rope.scaling.{key}") for name, key in others.items()}
        rope |= {name: value for name, value in scaled.items() if value is not None}
    if divisors is not None:
        rope |= {"rope_type": "llama3", "factor": float(max(divisors)), **LLAMA3_DEFAULTS}
    if kind not in (None, "none", *ROPE_SCALINGS) or (
        divisors is not None and not _is_llama3(rope, divisors)
    ):
        return None
    return _both(rope, stated) if stated.arch == "gemma3" else rope


def _is_llama3(rope: Mapping[str, Any], divisors: Sequence[float]) -> bool:
    """Whether Llama 3's constants lead to these divisors of the rotary frequencies."""
    exponents = np.arange(len(divisors)) / len(divisors)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    with np.errstate(all="ignore"):
        waves = 2 * np.pi * np.power(rope["rope_theta"], exponents)
        smooth = np.clip((rope["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
        return bool(np.allclose(1 / ((1 - smooth) / rope["factor"] + smooth), divisors, rtol=1e-4))


def _both(rope: dict[str, Any], stated: _StatedMetadata) -> dict[str, Any]:
    local = stated.own("rope.freq_base_swa")
    return {
        GLOBAL: rope,
        LOCAL: {"rope_type": "default", "rope_theta": 10000.0 if local is None else local},
    }


def _specials(stated: _StatedMetadata) -> dict[str, int]:
    """The ids of special tokens, by their keys in config.json."""
    keys = {"bos": "bos", "eos": "eos", "padding": "pad"}
    ids = {short: stated.get(f"tokenizer.ggml.{key}_token_id") for key, short in keys.items()}
    return {f"{short}_token_id": number for short, number in ids.items() if isinstance(number, int)}


def _family_keys(
    family: str, settings: Mapping[str, Any], stated: _StatedMetadata, shapes: Shapes
) -> dict[str, Any]:
    """What a family has of its own."""
    layers = settings["num_hidden_layers"]
    own: dict[str, Any] = {}
    if family in FULL_ATTENTION_EVERY:
        every = FULL_ATTENTION_EVERY[family]
        own["layer_types"] = [LOCAL if (index + 1) % every else GLOBAL for index in range(layers)]
    if family in LAYERS_OF_27B:
        heads = settings["hidden_size"] // settings["num_attention_heads"]
        own["query_pre_attn_scalar"] = heads if layers == LAYERS_OF_27B[family] else settings["head_dim"]
    if family == "llama":
        own["attention_bias"] = "blk.0.attn_q.bias" in shapes
        own["mlp_bias"] = "blk.0.ffn_down.bias" in shapes
    rotated, usual = (
        stated.own("rope.dimension_count"),
        settings["hidden_size"] // settings["num_attention_heads"],
    )
    if family in ("llama", "mixtral") and "head_dim" not in settings and rotated not in (None, usual):
        own["head_dim"] = rotated
    if family in NORMALIZES:
        own["norm_topk_prob"] = NORMALIZES[family]
    if family == "smollm3":
        own = {"pad_token_id": None, **_specials(stated)}  # its default is no token of small vocabularies
    if family == "qwen2_moe":
        own["qkv_bias"] = "blk.0.attn_q.bias" in shapes
    if family == "minimax_m2":
        own["scoring_func"] = "sigmoid"
        own["rope_parameters"] = {
            **(_rope(stated, None) or {}),
            "partial_rotary_factor": rotated / settings["head_dim"],
        }
    return own | _latent(stated) if family == "deepseek_v3" else own


def _latent(stated: _StatedMetadata) -> dict[str, Any]:
    """Latent attention: the file states the sizes of the absorbed keys."""
    rotated = stated.own("rope.dimension_count")
    own = {
        "qk_nope_head_dim": stated.own("attention.key_length_mla") - rotated,
        "head_dim": rotated,
        "num_key_value_heads": stated.own("attention.head_count"),
        "norm_topk_prob": bool(stated.own("expert_weights_norm")),
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 0,
    }
    if (multiplier := stated.own("rope.scaling.yarn_log_multiplier")) is not None:
        scale = round(multiplier * 10, 6)
        own["rope_parameters"] = {**(_rope(stated, None) or {}), "mscale": scale, "mscale_all_dim": scale}
    return own if stated.own("attention.q_lora_rank") is not None else {**own, "q_lora_rank": None}
