"""The hyperparameters of a GGUF file, from config.json.

Keys and types are those that llama.cpp's converter writes (`conversion/` of llama.cpp, as in llama-cpp-python 0.3.36).
It reads the config through transformers, which adds values that the file leaves out: `ASSUMED_VALUES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from reshard.families.outer_model import language_config
from reshard.families.rope import rope_parameters
from reshard.formats.gguf.typed_metadata import TypedMetadata
from reshard.formats.gguf.value_types import ValueType

Config = Mapping[str, Any]

ARCHITECTURES: Mapping[str, str] = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "deepseek_v3": "deepseek2",
    "qwen2_moe": "qwen2moe",
    "olmoe": "olmoe",
    "smollm3": "smollm3",
    "minimax_m2": "minimax-m2",
}
"""llama.cpp's name of the architecture, by `model_type` of config.json."""

YARN_DEFAULTS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}
ASSUMED_VALUES: Mapping[str, Config] = {
    "llama": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "mistral": {"max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "num_key_value_heads": 8},
    "mixtral": {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1000000.0,
    },
    "qwen2": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 32},
    "qwen3": {
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
    "qwen3_moe": {
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
    },
    "gemma": {
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 16,
        "head_dim": 256,
    },
    "gemma2": {
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "qwen2_moe": {
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "olmoe": {
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    "smollm3": {
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
    },
    "minimax_m2": {
        "max_position_embeddings": 196608,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "rope_theta": 5000000.0,
        "scoring_func": "sigmoid",
    },
    "gpt_oss": {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "head_dim": 64,
        "sliding_window": 128,
        "rope_parameters": YARN_DEFAULTS,
        "rope_theta": 150000.0,
    },
    "deepseek_v3": {
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        # transformers always computes this and does not store it; llama.cpp assumes softmax if the key is absent.
        "scoring_func": "sigmoid",
    },
}
"""What transformers 5 assumes for keys that config.json leaves out. Sizes that the tensors show are not listed."""

GLOBAL, LOCAL = "full_attention", "sliding_attention"
THETAS = {GLOBAL: 1_000_000.0, LOCAL: 10_000.0}
"""Gemma 3's bases of the rotary embedding."""
GATING_FUNCTIONS = {"softmax": 1, "sigmoid": 2, "sqrtsoftplus": 4}
"""llama.cpp's numbers for the functions that turn a router's logits into scores."""


class Hyperparameter(NamedTuple):
    """A key of the architecture, and where its value is: the first of these keys that the config has."""

    key: str
    type: ValueType
    names: tuple[str, ...]


COMMON_HYPERPARAMETERS = (
    Hyperparameter("block_count", ValueType.UINT32, ("num_hidden_layers",)),
    Hyperparameter("context_length", ValueType.UINT32, ("max_position_embeddings",)),
    Hyperparameter("embedding_length", ValueType.UINT32, ("hidden_size",)),
    Hyperparameter("feed_forward_length", ValueType.UINT32, ("intermediate_size",)),
    Hyperparameter("attention.head_count", ValueType.UINT32, ("num_attention_heads",)),
    Hyperparameter("attention.head_count_kv", ValueType.UINT32, ("kv_heads", "num_key_value_heads")),
    Hyperparameter("rope.scaling.type", ValueType.STRING, ("scaling.type",)),
    Hyperparameter("rope.scaling.factor", ValueType.FLOAT32, ("scaling.factor",)),
    Hyperparameter("rope.scaling.original_context_length", ValueType.UINT32, ("scaling.original",)),
    Hyperparameter("rope.scaling.yarn_ext_factor", ValueType.FLOAT32, ("scaling.extrapolation_factor",)),
    Hyperparameter(
        "rope.scaling.yarn_attn_factor",
        ValueType.FLOAT32,
        ("scaling.attention_factor", "scaling.attn_factor"),
    ),
    Hyperparameter("rope.scaling.yarn_beta_fast", ValueType.FLOAT32, ("scaling.beta_fast",)),
    Hyperparameter("rope.scaling.yarn_beta_slow", ValueType.FLOAT32, ("scaling.beta_slow",)),
    Hyperparameter("rope.freq_base", ValueType.FLOAT32, ("rope.theta",)),
    Hyperparameter("rope.freq_base_swa", ValueType.FLOAT32, ("rope.local_theta",)),
    Hyperparameter("attention.layer_norm_rms_epsilon", ValueType.FLOAT32, ("rms_norm_eps",)),
    Hyperparameter(
        "expert_count", ValueType.UINT32, ("num_local_experts", "num_experts", "n_routed_experts")
    ),
    Hyperparameter("expert_used_count", ValueType.UINT32, ("num_experts_per_tok",)),
    Hyperparameter("expert_group_count", ValueType.UINT32, ("n_group",)),
    Hyperparameter("expert_group_used_count", ValueType.UINT32, ("topk_group",)),
    Hyperparameter("expert_gating_func", ValueType.UINT32, ("gate",)),
    Hyperparameter("attention.key_length", ValueType.UINT32, ("key_length", "head_dim")),
    Hyperparameter("attention.value_length", ValueType.UINT32, ("value_length", "head_dim")),
)
ROPELESS = {"gemma", "gemma2"}
"""Architectures whose rotary embedding llama.cpp's converter does not describe: it has the base `PLAIN_THETA`."""
PLAIN_THETA = 10000.0
EXPERT_LENGTH = Hyperparameter(
    "expert_feed_forward_length", ValueType.UINT32, ("moe_intermediate_size", "intermediate_size")
)
VOCABULARY = Hyperparameter("vocab_size", ValueType.UINT32, ("vocab_size",))
SLIDING_WINDOW = Hyperparameter("attention.sliding_window", ValueType.UINT32, ("sliding_window",))
ROTATED = Hyperparameter("rope.dimension_count", ValueType.UINT32, ("rotated",))
OF_QWENS_EXPERTS = (
    EXPERT_LENGTH,
    Hyperparameter(
        "expert_shared_feed_forward_length", ValueType.UINT32, ("shared_expert_intermediate_size",)
    ),
)
OF_ARCHITECTURE: Mapping[str, tuple[Hyperparameter, ...]] = {
    "llama": (VOCABULARY, ROTATED),
    "smollm3": (VOCABULARY, ROTATED),
    "qwen2moe": OF_QWENS_EXPERTS,
    "qwen3moe": OF_QWENS_EXPERTS,
    "minimax-m2": (EXPERT_LENGTH, ROTATED),
    "gemma2": (
        Hyperparameter("attn_logit_softcapping", ValueType.FLOAT32, ("attn_logit_softcapping",)),
        Hyperparameter("final_logit_softcapping", ValueType.FLOAT32, ("final_logit_softcapping",)),
        SLIDING_WINDOW,
    ),
    "gemma3": (Hyperparameter("final_logit_softcapping", ValueType.FLOAT32, ("softcap",)), SLIDING_WINDOW),
    "gpt-oss": (SLIDING_WINDOW, EXPERT_LENGTH),
    "deepseek2": (
        Hyperparameter("leading_dense_block_count", ValueType.UINT32, ("first_k_dense_replace",)),
        VOCABULARY,
        Hyperparameter("attention.q_lora_rank", ValueType.UINT32, ("q_lora_rank",)),
        Hyperparameter("attention.kv_lora_rank", ValueType.UINT32, ("kv_lora_rank",)),
        Hyperparameter("attention.key_length_mla", ValueType.UINT32, ("key_length_mla",)),
        Hyperparameter("attention.value_length_mla", ValueType.UINT32, ("v_head_dim",)),
        EXPERT_LENGTH,
        Hyperparameter("expert_shared_count", ValueType.UINT32, ("n_shared_experts",)),
        Hyperparameter("expert_weights_scale", ValueType.FLOAT32, ("routed_scaling_factor",)),
        Hyperparameter("expert_weights_norm", ValueType.BOOL, ("normalised",)),
        ROTATED,
        Hyperparameter("rope.scaling.yarn_log_multiplier", ValueType.FLOAT32, ("log_multiplier",)),
    ),
}


def model_type(config: Config) -> str:
    """The `model_type` of the language model."""
    return str(language_config(config).get("model_type"))


def completed(config: Config) -> dict[str, Any]:
    """The config of the language model as transformers completes it."""
    whole = {**ASSUMED_VALUES.get(model_type(config), {}), **language_config(config)}
    heads = whole.get("num_attention_heads")
    if whole.get("num_key_value_heads") is None:
        whole["num_key_value_heads"] = heads
    if whole.get("head_dim") is None and model_type(config) in ("llama", "mistral"):
        whole["head_dim"] = whole["hidden_size"] // heads if heads else None
    return whole


def ropes(config: Config) -> tuple[Config, Config]:
    """The rotary embeddings of a completed config: that of full attention, and that of windows if it is another."""
    rope = rope_parameters(config)
    if any(isinstance(each, Mapping) for each in rope.values()):
        return rope.get(GLOBAL) or {}, rope.get(LOCAL) or {}
    if ARCHITECTURES.get(str(config.get("model_type"))) != "gemma3":
        return {"rope_theta": PLAIN_THETA, **rope}, {}
    local = config.get("rope_local_base_freq") or THETAS[LOCAL]
    return {"rope_theta": THETAS[GLOBAL], **rope}, {"rope_theta": local}


def _scaling(rope: Config, config: Config) -> Iterator[tuple[str, Any]]:
    """The scaling of a rotary embedding that llama.cpp has keys for. Llama 3's is a tensor."""
    kind = rope.get("rope_type")
    if kind in ("su", "longrope"):
        yield "scaling.type", "longrope"
    if kind not in ("linear", "yarn") or rope.get("factor") is None:
        return
    yield "scaling.type", kind
    yield "scaling.factor", rope["factor"]
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings") or config.get("max_position_embeddings")
        yield "scaling.original", original
        for key in ("extrapolation_factor", "attention_factor", "attn_factor", "beta_fast", "beta_slow"):
            yield f"scaling.{key}", rope.get(key)


def _llama(config: Config) -> dict[str, Any]:
    return {"rotated": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]}


def _gemma3(config: Config) -> dict[str, Any]:
    window = None if config.get("sliding_window_pattern") == 1 else config.get("sliding_window")
    return {"softcap": config.get("final_logit_softcapping") or None, "sliding_window": window}


def _deepseek2(config: Config) -> dict[str, Any]:
    """Latent attention is computed as attention of one group, whose keys are latent vectors and rotated parts."""
    latent, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    scale = ropes(config)[0].get("mscale_all_dim")
    return {
        "kv_heads": 1,
        "key_length": latent + rotated,
        "value_length": latent,
        "key_length_mla": config["qk_nope_head_dim"] + rotated,
        "rotated": rotated,
        "normalised": config.get("norm_topk_prob") or None,
        "log_multiplier": None if scale is None else 0.1 * scale,
    }


def _olmoe(config: Config) -> dict[str, Any]:
    return {"rms_norm_eps": 1e-5}


def _minimax(config: Config) -> dict[str, Any]:
    part = ropes(config)[0].get("partial_rotary_factor", 1.0)
    return {"rotated": config.get("rotary_dim") or round(config["head_dim"] * part)}


_DERIVED: Mapping[str, Callable[[Config], dict[str, Any]]] = {
    "llama": _llama,
    "smollm3": _llama,
    "olmoe": _olmoe,
    "minimax-m2": _minimax,
    "gemma3": _gemma3,
    "deepseek2": _deepseek2,
}


def hyperparameters(config: Config, arch: str, keys: TypedMetadata) -> None:
    """Set the keys of the architecture."""
    whole = completed(config)
    rope, local = ropes(whole)
    values = {
        **whole,
        **dict(_scaling(rope, whole)),
        "rope.theta": rope.get("rope_theta"),
        "rope.local_theta": local.get("rope_theta"),
        "gate": GATING_FUNCTIONS.get(str(whole.get("scoring_func"))),
        **(_DERIVED[arch](whole) if arch in _DERIVED else {}),
    }
    is_known = arch in ROPELESS and rope.get("rope_theta") == PLAIN_THETA and "scaling.type" not in values
    common = [fact for fact in COMMON_HYPERPARAMETERS if not (is_known and fact.key.startswith("rope."))]
    for fact in (*common, *OF_ARCHITECTURE.get(arch, ())):
        name = next((name for name in fact.names if values.get(name) is not None), None)
        if name is not None:
            keys.set(f"{arch}.{fact.key}", fact.type, values[name])
