"""Folders with tensors larger than the memory of their conversions: shapes are real, bits are random."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bench.models import make
from reshard.algebra.dtypes import dtype
from reshard.containers.safetensors import header_bytes

Stored = dict[str, tuple[str, tuple[int, ...]]]
"""The dtype and the shape of tensors, by name."""

BITS = (np.random.default_rng(0).integers(0, 1 << 16, 4 << 20, dtype=np.uint16) & 0x83FF | 0x3800).tobytes()

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 32768,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 49152,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""A layer whose MLP projections have 64 MiB each, and an embedding of 96 MiB."""

MLP = {"gate_proj": (32768, 1024), "up_proj": (32768, 1024), "down_proj": (1024, 32768)}
PROJECTIONS = {
    **{f"mlp.{name}": shape for name, shape in MLP.items()},
    "self_attn.q_proj": (1024, 1024),
    "self_attn.k_proj": (256, 1024),
    "self_attn.v_proj": (256, 1024),
    "self_attn.o_proj": (1024, 1024),
}

GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "layer_types": ["full_attention"],
    "sliding_window": 128,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""A layer with experts of 128 and of 64 MiB, which Megatron and MXFP4 store with their axes exchanged."""


def llama(folder: Path) -> Path:
    """The model of most conversions."""
    return make(folder, LLAMA)


def gpt_oss(folder: Path) -> Path:
    """The model with stacked experts."""
    return make(folder, GPT_OSS)


def adapter(folder: Path, rank: int = 16, **settings: Any) -> Path:
    """A LoRA adapter of all projections, as PEFT stores it; `use_dora` adds magnitudes."""
    tensors: Stored = {}
    for name, (rows, columns) in PROJECTIONS.items():
        module = f"base_model.model.model.layers.0.{name}"
        tensors[f"{module}.lora_A.weight"] = ("float32", (rank, columns))
        tensors[f"{module}.lora_B.weight"] = ("float32", (rows, rank))
        if settings.get("use_dora"):
            tensors[f"{module}.lora_magnitude_vector"] = ("float32", (rows,))
    modules = [name.split(".")[1] for name in PROJECTIONS]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": modules, **settings}
    return _folder(folder, tensors, {"adapter_config.json": config}, "adapter_model.safetensors")


def gptq(folder: Path) -> Path:
    """4-bit values in groups, along columns; rows belong to groups in no order."""
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}
    return _packed(folder, {"quantization_config": settings}, rows=8, columns=1, order=True)


def awq(folder: Path) -> Path:
    """4-bit values in groups, along rows."""
    settings = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
    return _packed(folder, {"quantization_config": settings}, rows=1, columns=8, order=False)


def _packed(folder: Path, config: Mapping[str, Any], *, rows: int, columns: int, order: bool) -> Path:
    tensors: Stored = {}
    for name, (out, width) in PROJECTIONS.items():
        module = f"model.layers.0.{name}"
        tensors[f"{module}.qweight"] = ("int32", (width // rows, out // columns))
        tensors[f"{module}.qzeros"] = ("int32", (width // 128, out // 8))
        tensors[f"{module}.scales"] = ("float16", (width // 128, out))
        if order:
            tensors[f"{module}.g_idx"] = ("int32", (width,))
    return _folder(folder, {**tensors, **_others()}, {"config.json": {**LLAMA, **config}})


def nf4(folder: Path) -> Path:
    """Indices into a table, as bitsandbytes stores them, with scales that are quantized, too."""
    tensors, states = dict(_others()), {}
    for name, (out, width) in PROJECTIONS.items():
        weight, size = f"model.layers.0.{name}.weight", out * width
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [out, width]}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}
        states[f"{weight}.quant_state.bitsandbytes__nf4"] = json.dumps(state).encode()
        tensors[weight] = ("uint8", (size // 2, 1))
        tensors[f"{weight}.absmax"] = ("uint8", (size // 64,))
        tensors[f"{weight}.quant_map"] = ("float32", (16,))
        tensors[f"{weight}.nested_absmax"] = ("float32", (size // 64 // 256,))
        tensors[f"{weight}.nested_quant_map"] = ("float32", (256,))
    tensors |= {name: ("uint8", (len(content),)) for name, content in states.items()}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return _folder(folder, tensors, {"config.json": {**LLAMA, "quantization_config": config}}, known=states)


def int8(folder: Path) -> Path:
    """Rows of int8 with a scale each, as bitsandbytes stores them."""
    tensors = dict(_others())
    for name, (out, width) in PROJECTIONS.items():
        tensors[f"model.layers.0.{name}.weight"] = ("int8", (out, width))
        tensors[f"model.layers.0.{name}.SCB"] = ("float32", (out,))
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return _folder(folder, tensors, {"config.json": {**LLAMA, "quantization_config": config}})


def many(folder: Path, count: int = 20_000) -> Path:
    """A model of `count` tensors of a few kilobytes, of no declared family."""
    tensors: Stored = {f"layers.{i}.weight": ("bfloat16", (32, 32)) for i in range(count)}
    return _folder(folder, tensors, {"config.json": {"model_type": "unheard_of", "hidden_size": 32}})


def _others() -> Stored:
    """Tensors that stay unquantized when a model is quantized."""
    norms = ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")
    return {
        "model.embed_tokens.weight": ("bfloat16", (49152, 1024)),
        **{f"{name}.weight": ("bfloat16", (1024,)) for name in norms},
    }


def _folder(
    folder: Path,
    tensors: Stored,
    configs: Mapping[str, Any],
    name: str = "model.safetensors",
    known: Mapping[str, bytes] | None = None,
) -> Path:
    folder.mkdir(parents=True)
    for file, content in configs.items():
        (folder / file).write_text(json.dumps(content))
    header, _ = header_bytes([(key, dtype(kind), shape) for key, (kind, shape) in tensors.items()])
    with (folder / name).open("wb") as out:
        out.write(header)
        for key, (kind, shape) in tensors.items():
            if known and key in known:
                out.write(known[key])
            elif key.endswith("g_idx"):
                groups = np.arange(shape[0], dtype=np.int32) // 128
                out.write(np.random.default_rng(0).permutation(groups).tobytes())
            else:
                _write(out, dtype(kind).itemsize * int(np.prod(shape)))
    return folder


def _write(out: BinaryIO, nbytes: int) -> None:
    """Random bits: in 16-bit and 32-bit types finite numbers, not too small and not too large."""
    for begin in range(0, nbytes, len(BITS)):
        out.write(BITS[: nbytes - begin])
