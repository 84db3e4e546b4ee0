"""The `config.json` of transformers that says what `model_config.yaml` of LitGPT does, as far as it is determined.

Source: `litgpt/config.py` and `litgpt/model.py` of LitGPT 0.5.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.base.errors import UNUSABLE
from reshard.families.config_map import count_layers
from reshard.families.dialects.litgpt import kind

Values = dict[str, Any]
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
}
LAYER_NORM = ("phi", "gpt_neox")
GEMMAS = ("gemma", "gemma2", "gemma3_text")
GELU_NAMES = {"tanh": "gelu_new", "none": "gelu"}
SIZE_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_query_groups",
    "head_dim": "head_size",
    "intermediate_size": "intermediate_size",
    "vocab_size": "padded_vocab_size",
    "max_position_embeddings": "block_size",
}


def sizes(settings: Mapping[str, Any]) -> Values:
    """The sizes that rules need. Raises ValueError for one that is no number."""
    stated = {"n_query_groups": settings.get("n_head"), **_set_values(settings)}
    if "head_size" not in stated and stated.get("n_head"):
        stated["head_size"] = stated.get("n_embd", 0) // stated["n_head"]
    for own in SIZE_KEYS.values():
        if type(stated.get(own)) is not int or stated[own] < 1:
            raise ValueError(f"{own} {stated.get(own)}")
    count_layers(stated["n_layer"])
    return {key: stated[own] for key, own in SIZE_KEYS.items()}


def _set_values(settings: Mapping[str, Any]) -> Values:
    return {key: value for key, value in settings.items() if value is not None}


def config_of(settings: Mapping[str, Any]) -> Values | None:
    """The config.json of a model; None if its class in transformers computes something else, or is not known here."""
    try:
        return _derived_config(settings)
    except UNUSABLE:
        return None


def _derived_config(settings: Mapping[str, Any]) -> Values | None:
    model_type = _model_type(settings)
    if model_type is None or not _is_usual(model_type, settings):
        return None
    rope = _rope(settings)
    if rope is None:
        return None
    norm = "layer_norm_eps" if model_type in LAYER_NORM else "rms_norm_eps"
    return {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        **sizes(settings),
        norm: settings["norm_eps"],
        "rope_parameters": rope,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **_class_keys(model_type, settings, rope),
    }


def _model_type(settings: Mapping[str, Any]) -> str | None:
    known, has_experts = kind(settings), settings.get("mlp_class_name") == "LLaMAMoE"
    if known == "llama" and has_experts:
        return "mixtral"
    if known == "llama" and settings.get("mlp_class_name") == "GemmaMLP":
        return "gemma"
    if known == "llama" and settings.get("attn_bias"):
        return "qwen2"
    if known == "llama" and (
        settings.get("sliding_window_size") or "stral-" in str(settings.get("name")).lower()
    ):
        return "mistral"
    if known == "qwen3" and has_experts:
        return "qwen3_moe"
    return "gemma3_text" if known == "gemma3" else known


def _is_usual(model_type: str, settings: Mapping[str, Any]) -> bool:
    """Whether LitGPT computes what the class of transformers does with the keys that `_class_keys` gives it."""
    is_gemma, is_neox = model_type in GEMMAS, model_type in LAYER_NORM
    after = model_type in ("gemma2", "gemma3_text", "olmo2")
    wanted = {
        "norm_class_name": "LayerNorm" if is_neox else "RMSNorm",
        "mlp_class_name": _MLP.get(model_type, "LLaMAMLP"),
        "bias": is_neox,
        "attn_bias": model_type == "qwen2",
        "lm_head_bias": model_type == "phi",
        "norm_qk": model_type in ("qwen3", "qwen3_moe", "gemma3_text", "olmo2"),
        "norm_qk_type": "olmo2" if model_type == "olmo2" else "default",
        "post_attention_norm": after,
        "post_mlp_norm": after,
        "norm_1": model_type != "olmo2",
        "norm_2": model_type != "olmo2",
        "shared_attention_norm": model_type == "phi",
        "scale_embeddings": is_gemma,
        "rope_interleave": False,
        "routed_scaling_factor": 1.0,
        "n_expert_groups": None,
        "first_k_dense_replace": None,
        "rotary_percentage": 1.0,
        "parallel_residual": model_type == "phi",
        "attention_scores_scalar": None,
        "attention_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window_size": None,
    }
    own = {
        **dict.fromkeys(("phi", "phi3"), ("rotary_percentage",)),
        "gpt_neox": ("rotary_percentage", "parallel_residual"),
        "gemma2": ("attention_scores_scalar", "attention_logit_softcapping", "final_logit_softcapping"),
        "gemma3_text": ("attention_scores_scalar",),
    }.get(model_type, ())
    if model_type in ("mistral", "phi3", "gemma2", "gemma3_text"):
        own = (*own, "sliding_window_size")
    differing = {key for key, value in wanted.items() if settings.get(key, DEFAULTS.get(key)) != value}
    layers = settings.get("sliding_window_indices")
    return differing <= {*own} and (model_type in ("gemma2", "gemma3_text") or all(layers or ()))


_MLP = {
    **dict.fromkeys(LAYER_NORM, "GptNeoxMLP"),
    **dict.fromkeys(GEMMAS, "GemmaMLP"),
    **dict.fromkeys(("mixtral", "qwen3_moe"), "LLaMAMoE"),
}
DEFAULTS: Values = {
    "norm_class_name": "LayerNorm",
    "mlp_class_name": "GptNeoxMLP",
    **dict.fromkeys(("bias", "norm_1", "norm_2", "parallel_residual"), True),
    **dict.fromkeys(("attn_bias", "lm_head_bias", "norm_qk", "post_attention_norm", "post_mlp_norm"), False),
    **dict.fromkeys(("shared_attention_norm", "scale_embeddings", "rope_interleave"), False),
    "norm_qk_type": "default",
    "routed_scaling_factor": 1.0,
    "rotary_percentage": 0.25,
}
"""What LitGPT takes for keys that an older file does not have."""


def _rope(settings: Mapping[str, Any]) -> Values | None:
    """The rotary embedding; None for one that transformers scales differently."""
    rope: Values = {"rope_type": "default", "rope_theta": float(settings.get("rope_base", 10000))}
    condense, adjusted = settings.get("rope_condense_ratio", 1), settings.get("rope_adjustments") or {}
    if condense != 1:
        return None if adjusted else {**rope, "rope_type": "linear", "factor": float(condense)}
    if not adjusted:
        return rope
    if adjusted.keys() == {"factor"}:
        return {**rope, "rope_type": "linear", "factor": adjusted["factor"]}
    keys = ("factor", "low_freq_factor", "high_freq_factor")
    if adjusted.keys() != {*keys, "original_max_seq_len"}:
        return None
    scaled = {key: adjusted[key] for key in keys}
    return {
        **rope,
        "rope_type": "llama3",
        **scaled,
        "original_max_position_embeddings": adjusted["original_max_seq_len"],
    }


def _class_keys(model_type: str, settings: Mapping[str, Any], rope: Values) -> Values:
    """The keys that only some classes have."""
    window = {"sliding_window": settings.get("sliding_window_size")}
    experts = {"num_experts_per_tok": settings.get("n_expert_per_token")}
    match model_type:
        case "mistral":
            return window
        case "mixtral":
            return {**experts, **window, "num_local_experts": settings["n_expert"]}
        case "qwen3_moe":
            every = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
            size = {"moe_intermediate_size": settings["moe_intermediate_size"]}
            return {**experts, **every, **size, "num_experts": settings["n_expert"]}
        case "gemma" | "gemma2" | "gemma3_text":
            return _of_gemma(model_type, settings, rope)
        case "phi" | "phi3" | "gpt_neox":
            return _partly_rotated(model_type, settings, rope)
    return {}


def _of_gemma(model_type: str, settings: Mapping[str, Any], rope: Values) -> Values:
    gelu = "gelu_pytorch_tanh"
    config: Values = {"hidden_activation": gelu, "hidden_act": gelu}
    if model_type == "gemma":
        return config
    kinds = [_NEAR if each else _FAR for each in settings["sliding_window_indices"]]
    config |= {"sliding_window": settings["sliding_window_size"], "layer_types": kinds[: settings["n_layer"]]}
    config["query_pre_attn_scalar"] = settings.get("attention_scores_scalar") or settings["head_size"]
    if model_type == "gemma2":
        config["attn_logit_softcapping"] = settings.get("attention_logit_softcapping")
        config["final_logit_softcapping"] = settings.get("final_logit_softcapping")
        return config
    near = {"rope_type": "default", "rope_theta": float(settings["rope_local_base_freq"])}
    return {**config, "rope_parameters": {_FAR: rope, _NEAR: near}}


_NEAR, _FAR = "sliding_attention", "full_attention"


def _partly_rotated(model_type: str, settings: Mapping[str, Any], rope: Values) -> Values:
    rotated = settings.get("rotary_percentage", DEFAULTS["rotary_percentage"])
    config: Values = {"rope_parameters": {**rope, "partial_rotary_factor": rotated}}
    if model_type == "phi3":
        length = {"original_max_position_embeddings": settings["block_size"], "pad_token_id": None}
        return {**config, **length, "sliding_window": settings.get("sliding_window_size")}
    config["hidden_act"] = GELU_NAMES[str(settings.get("gelu_approximate", "none"))]
    if model_type == "gpt_neox":
        config["use_parallel_residual"] = settings.get("parallel_residual", True)
    return config
