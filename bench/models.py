"""Synthetic Hugging Face folders with real shapes: random bf16 weights, real configs, no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from reshard.algebra.dtypes import DType, dtype
from reshard.containers.safetensors import header_bytes
from reshard.families import declared
from reshard.families.binding import Binding
from reshard.families.dims import Dims

SHARD = 2_000_000_000
BF16, FLOAT32, FP8 = dtype("bfloat16"), dtype("float32"), dtype("float8_e4m3fn")

QWEN2_5_3B: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LLAMA_3_1_405B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3_MOE: dict[str, Any] = {
    **QWEN2_5_3B,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
FP8_BLOCKS = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
}
FP8_CHANNELS = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            }
        },
    }
}
KIMI_K2: dict[str, Any] = {
    **DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
    "vocab_size": 163840,
    "rope_theta": 50000.0,
}
GLM_4_5: dict[str, Any] = {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "partial_rotary_factor": 0.5,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_qk_norm": True,
    "vocab_size": 151552,
}
QWEN3_5_397B: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        "hidden_size": 4096,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 64,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "full_attention_interval": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 15,
        "mtp_num_hidden_layers": 1,
        "dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {"model_type": "qwen3_5_moe", "depth": 27, "hidden_size": 1152},
}
REAL_SIZES: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": DEEPSEEK_V3,
    "DeepSeek-V3 in FP8": {**DEEPSEEK_V3, **FP8_BLOCKS},
    "Kimi-K2 in FP8": {**KIMI_K2, **FP8_BLOCKS},
    "GLM-4.5 in FP8": {**GLM_4_5, **FP8_CHANNELS},
    "Qwen3.5-397B": QWEN3_5_397B,
}
"""Headers of published models, on sparse files: for plans. A vision tower is represented by one tensor."""

Stored = tuple[str, DType, tuple[int, ...]]


def make(folder: Path, config: Mapping[str, Any], *, sparse: bool = False) -> Path:
    """Write a folder unless it exists. `sparse` files have their full size, but store no data."""
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(config))
    weight_map = {}
    for index, shard in enumerate(shards, 1):
        name = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        header, _ = header_bytes(shard)
        size = sum(map(_nbytes, shard))
        with (folder / name).open("wb") as file:
            file.write(header)
            if sparse:
                file.truncate(len(header) + size)
            else:
                _write_random(file, size)
        weight_map.update(dict.fromkeys((tensor for tensor, *_ in shard), name))
    index_json = {"metadata": {"total_size": sum(_nbytes(each) for shard in shards for each in shard)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps({**index_json, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def _shards(config: Mapping[str, Any]) -> Iterator[list[Stored]]:
    shard: list[Stored] = []
    size = 0
    for stored in _tensors(config):
        nbytes = _nbytes(stored)
        if shard and size + nbytes > SHARD:
            yield shard
            shard, size = [], 0
        shard.append(stored)
        size += nbytes
    yield shard


def _tensors(config: Mapping[str, Any]) -> Iterator[Stored]:
    family = declared(config["model_type"])
    assert family
    text = family.config.text(config)
    dims = Dims.from_args(family.config.to_args(text), text["vocab_size"])
    rules = family.rules_of(family.computed_by)
    assert rules
    for carried in family.within.carried if family.within else ():
        yield f"{carried.hub}blocks.0.attn.qkv.weight", BF16, (3456, 1152)
    method = config.get("quantization_config", {}).get("quant_method")
    for name, bound in Binding(rules(dims)).written():
        if not (method and name.endswith("_proj.weight") and "eh_proj" not in name):
            yield name, BF16, bound.shape
            continue
        rows, columns = bound.shape
        yield name, FP8, bound.shape
        if method == "fp8":
            yield f"{name}_scale_inv", FLOAT32, (-(-rows // 128), -(-columns // 128))
        else:
            yield f"{name}_scale", BF16, (rows, 1)


def _nbytes(stored: Stored) -> int:
    return int(np.prod(stored[2])) * stored[1].itemsize


def _write_random(file: Any, size: int) -> None:
    """Random bits that are finite numbers; one block is generated and rolled, which is enough for copying."""
    block = np.random.default_rng(0).integers(0, 1 << 16, 8 << 20, dtype=np.uint16) & 0xBFFF
    while size > 0:
        data = block.tobytes()[: min(size, block.nbytes)]
        file.write(data)
        size -= len(data)
        block = np.roll(block, 12345)
