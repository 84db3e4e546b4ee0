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
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from tests.genuine.huggingface import randomise
from tests.genuine.live import OWN
from tests.genuine.model_types import TYPES

CLASSES: dict[str, str] = {
    name: kind if isinstance(kind, str) else kind[0]
    for name, kind in sorted(
        {
            **MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
            **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        }.items()
    )
}
"""The class of each model type."""

HEADS = 4
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "max_position_embeddings"), 96),
    **dict.fromkeys(("n_positions", "n_ctx", "max_seq_len"), 96),
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
    **dict.fromkeys(("out_hidden_size", "projection_dim", "output_dim", "text_hidden_size"), 32),
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
LARGEST = 12_000_000
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_COMPASS = {
    "layer_types": ["full_attention", "sliding_attention"],
    "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
}
_CODES = {"num_embeddings": 16, "codebook_size": 16, "embed_dim": 8, "latent_channels": 8, "resolution": 16}
_QUANTIZER = {**_CODES, "base_channels": 32, "channel_multiplier": [1, 1], "hidden_size": 32}
MORE: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 50, "encoder_hash_byte_group_size": [3, 4]},
    "chameleon": {"vocabulary_map": {"a": 1, "<image>": 90}, "vq_config": _QUANTIZER},
    "cohere_compass": {"text_config": _COMPASS},
    "cohere_compass_text": _COMPASS,
    "cosmos3_edge": {"text_config": {"head_dim": 128}},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "emu3": {"vocabulary_map": {"<image>": 90}, "vq_config": {**_QUANTIZER, "attn_resolutions": []}},
    "ernie4_5_vl_moe": {
        "text_config": {
            "hidden_size": 256,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "moe_intermediate_size": [24, 12],
            "mlp_layer_types": ["dense", "sparse"],
        },
        "vision_config": {"num_heads": 2, "hidden_size": 64},
    },
    "florence2": {
        "vision_config": {
            "depths": [1, 1],
            "patch_size": [3, 3],
            "patch_stride": [2, 2],
            "patch_padding": [1, 1],
            "patch_prenorm": [False, True],
            "embed_dim": [16, 32],
            "num_heads": [2, 2],
            "num_groups": [2, 2],
            "window_size": 4,
        }
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "num_kv_shared_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [1],
        "vision_config": {"hidden_size": 64},
        "text_config": {"hidden_size": 64},
        "qformer_config": {"hidden_size": 64, "encoder_hidden_size": 64},
    },
    "glm5_next": {"text_config": {"qk_rope_head_dim": 0}},
    "hunyuan_vl": {"text_config": {"rope_parameters": _ROPE, "head_dim": 8}},
    "hy_v4_vl": {"text_config": {"qk_rope_head_dim": 64}},
    "hunyuan_v1_dense": {"rope_parameters": _ROPE, "head_dim": 8},
    "janus": {"vq_config": _QUANTIZER},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8},
    "ministral": {"rope_parameters": _ROPE, "head_dim": 8},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "local"],
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "axial_pos_embds": False,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 20,
        "shape_vocab_size": 30,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    "xlm": {"emb_dim": 32},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_d_state": 8,
        "attention_head_dim": 16,
    },
    "zaya": {
        "num_experts_per_tok": 1,
        "num_key_value_heads": 2,
        "layer_types": ["hybrid"] * 2,
        "router_hidden_size": 16,
    },
}
"""Settings of types that need more than sizes."""
NOT_SMALL = {
    "apertus1p5",
    "deepseek_ocr2",
    "diffusion_gemma",
    "dots3_note",
    "encoder-decoder",
    "fast_vlm",
    "gemma3n",
    "gemma4_assistant",
    "inkling_mm_model",
    "muse_spark",
    "nemo_speechlm",
    "nemotron_h_omni",
    "perception_lm",
    "t5gemma",
    "t5gemma2",
    "vibevoice_asr",
    "vision-encoder-decoder",
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


def _merged(settings: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, with more of them, also in configs within."""
    inner = {
        key: _merged(settings.get(key, {}), value) if key.endswith("config") else value
        for key, value in more.items()
    }
    return {**settings, **inner}


def _attempts(model_type: str) -> Iterator[dict[str, Any]]:
    small = _small(CONFIG_MAPPING[model_type]().to_dict(), SIZES)
    own = OWN.get(model_type, {})
    if model_type in MORE:
        yield _merged(small, MORE[model_type])
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
            for name, buffer in model.named_buffers():
                if name.endswith("balancing_biases"):
                    buffer[-1] = -1  # as transformers sets it whenever it loads a model
            return model.eval()
    raise ValueError(f"{model_type} cannot be built small")


def _refuse_large(kind: Any, config: PreTrainedConfig) -> None:
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind._from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters")
