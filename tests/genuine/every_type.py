"""Small random models of every type that transformers can build so, for text alone or with other inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.genuine.huggingface import randomise
from tests.genuine.live import OWN
from tests.genuine.model_types import TYPES

CLASSES: dict[str, str] = {
    name: kind if isinstance(kind, str) else kind[0]
    for name, kind in sorted(
        (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES).items()
    )
}
"""The class of each model type."""

HEADS = 4
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 96),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "hidden_dim", "embed_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_layers", "depths"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("expert_ffn_hidden_size", "ffn_hidden_size"), 24),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("image_size", "input_size"), 16),
    **dict.fromkeys(("out_hidden_size", "projection_dim", "output_dim"), 32),
    "num_key_value_heads": HEADS,
    "head_dim": 8,
    "qk_rope_head_dim": 4,
    "patch_size": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_mel_bins": 8,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
    "image_token_id": 90,
    "image_token_index": 90,
    "video_token_id": 91,
    "video_token_index": 91,
    "audio_token_id": 92,
    "vision_start_token_id": 93,
    "vision_end_token_id": 94,
}
LARGEST = 8_000_000
NOT_SMALL = {
    "bamba",
    "blt",
    "chameleon",
    "cohere_compass",
    "cohere_compass_text",
    "cosmos3_edge",
    "dbrx",
    "deepseek_ocr2",
    "diffusion_gemma",
    "dots3_note",
    "emu3",
    "ernie4_5_vl_moe",
    "fast_vlm",
    "florence2",
    "gemma3n",
    "gemma3n_text",
    "gemma4_assistant",
    "gemma4_unified_assistant",
    "glm5_next",
    "gpt_neo",
    "granite4_vision",
    "hunyuan_v1_dense",
    "hunyuan_vl",
    "inkling2",
    "inkling_mm_model",
    "janus",
    "mamba2",
    "ministral",
    "molmo2",
    "muse_spark",
    "nemotron_h_omni",
    "perception_lm",
    "pp_formulanet",
    "reformer",
    "roc_bert",
    "t5gemma2",
    "vision-encoder-decoder",
    "xlm",
    "zamba",
    "zamba2",
    "zaya",
}
"""Types that cannot be built like this: their configs need more than sizes, or a package that is not installed."""


def _small(found: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among `found`, and in configs within it, that have a small value."""
    small: dict[str, Any] = {}
    for key, value in found.items():
        if isinstance(value, dict) and key.endswith("config"):
            named = {"model_type": value["model_type"]} if value.get("model_type") else {}
            small[key] = {**_small(value, sizes), **named}
        elif key in sizes and type(value) is int:
            small[key] = sizes[key]
    return small


def _attempts(model_type: str) -> Iterator[dict[str, Any]]:
    small = _small(CONFIG_MAPPING[model_type]().to_dict(), SIZES)
    own = OWN.get(model_type, {})
    yield {**small, **own, **({"num_hidden_layers": len(own["layer_types"])} if "layer_types" in own else {})}
    yield {**small, "num_key_value_heads": 2}
    plain = {key: value for key, value in small.items() if not isinstance(value, dict)}
    yield {**small, "text_config": {**small.get("text_config", {}), "model_type": "llama"}, **plain}
    if model_type in TYPES and not TYPES[model_type].module:
        yield dict(TYPES[model_type].settings)


def small_configs(kind: Any) -> Iterator[PreTrainedConfig]:
    """Small configs of a class; those that it refuses are left out."""
    for settings in _attempts(kind.config_class.model_type):
        with suppress(Exception):  # its own checks raise many kinds
            yield kind.config_class(**settings)


def build(model_type: str) -> torch.nn.Module:
    """A small random model. Raises ValueError if it cannot be built like this."""
    kind = getattr(transformers, CLASSES[model_type])
    for config in small_configs(kind):
        with suppress(Exception):
            _refuse_large(kind, config)
            torch.manual_seed(0)
            model = kind._from_config(config, dtype=torch.float32)
            randomise(model, torch.Generator().manual_seed(0))
            return model.eval()
    raise ValueError(f"{model_type} cannot be built small")


def _refuse_large(kind: Any, config: PreTrainedConfig) -> None:
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind._from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters")
