"""Quantized Hugging Face folders, made from plain ones in bfloat16.

FP8 uses the operation with which transformers quantizes. MXFP4 is gpt-oss's format on the Hub: the kernels that make
it need a GPU, but any bits are valid values, so they are random.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config, PreTrainedModel
from transformers.integrations.finegrained_fp8 import Fp8Quantize

GPT_OSS = {
    "modules_to_not_convert": [
        *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
    ],
    "quant_method": "mxfp4",
}


def fp8(plain: Path, out: Path, *, block: int = 16) -> Path:
    """Each projection in FP8 with a scale per block, as DeepSeek publishes its models."""
    settings = FineGrainedFP8Config(weight_block_size=(block, block))
    quantize = Fp8Quantize(SimpleNamespace(quantization_config=settings))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        projection = name.endswith("_proj.weight") and "eh_proj" not in name
        tensors |= quantize.convert({name: tensor}) if projection else {name: tensor}
    return with_tensors(plain, out, tensors, settings.to_dict())


def mxfp4(plain: Path, out: Path) -> Path:
    """The experts of gpt-oss: blocks of 32 values in 16 bytes, and a power of two for each."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        experts, rows, columns = tensor.shape
        for part, inner, low, high in (("blocks", (16,), 0, 256), ("scales", (), 118, 123)):
            shape = (experts, columns, rows // 32, *inner)
            tensors[f"{name}_{part}"] = torch.randint(low, high, shape, generator=generator).to(torch.uint8)
    return with_tensors(plain, out, tensors, GPT_OSS)


def with_tensors(
    plain: Path, out: Path, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any] | None
) -> Path:
    """The folder `plain` with other tensors; `settings` become its `quantization_config`."""
    shutil.copytree(plain, out)
    for file in out.glob("model*"):
        file.unlink()
    save_file(dict(tensors), out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config.pop("quantization_config", None)
    config |= {"quantization_config": dict(settings)} if settings else {}
    (out / "config.json").write_text(json.dumps(config))
    return out


def dequantized_by_transformers(folder: Path) -> PreTrainedModel:
    """The model of a quantized folder with plain weights in bfloat16, as transformers makes them on a CPU."""
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    if settings["quant_method"] == "fp8":
        how: Any = FineGrainedFP8Config(weight_block_size=settings["weight_block_size"], dequantize=True)
    else:
        how = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=how)


def assert_holds(folder: Path, expected: Mapping[str, torch.Tensor]) -> None:
    """Assert that a plain folder has exactly these tensors, and no trace of quantization."""
    found = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        np.testing.assert_array_equal(bits(found[name]), bits(tensor), err_msg=name)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()
