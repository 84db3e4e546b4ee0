"""Folders that ModelOpt itself quantizes and exports, and what its own classes make of them; in "modelopt".

    python -m tests.genuine.make_modelopt KIND PLAIN OUT EXPECTED

quantizes the folder PLAIN, exports the folder OUT, and writes the weights that the package dequantizes from it to the
file EXPECTED, in bfloat16. KIND is one of `KINDS`.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

BFLOAT16 = torch.bfloat16
_FP8 = {"num_bits": (4, 3), "axis": None}


def mixed() -> dict[str, Any]:
    """Attention in FP8, and everything else in NVFP4."""
    settings = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG)
    for each in ("weight", "input"):
        settings["quant_cfg"].append({"quantizer_name": f"*self_attn*_proj.{each}_quantizer", "cfg": _FP8})
    return settings


KINDS = {
    "NVFP4": mtq.NVFP4_DEFAULT_CFG,
    "W4A16_NVFP4": mtq.W4A16_NVFP4_CFG,
    "W4A8_NVFP4_FP8": mtq.W4A8_NVFP4_FP8_CFG,
    "FP8": mtq.FP8_DEFAULT_CFG,
    "FP8_PER_CHANNEL": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
    "MXFP8": mtq.MXFP8_DEFAULT_CFG,
    "mixed": mixed(),
}


def dequantized(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All weights in bfloat16, by the class that has the form in which each is stored."""
    made = {}
    for name, tensor in stored.items():
        if name.endswith(("_scale", "_scale_2")):
            continue
        scale, outer = stored.get(f"{name}_scale"), stored.get(f"{name}_scale_2")
        if scale is None:
            made[name] = tensor
        elif outer is not None:
            shape = torch.Size((*tensor.shape[:-1], 2 * tensor.shape[-1]))
            how = {"scale": scale, "double_scale": outer, "block_sizes": {-1: shape[-1] // scale.shape[-1]}}
            made[name] = NVFP4QTensor(shape, BFLOAT16, tensor).dequantize(BFLOAT16, **how)
        elif scale.dtype == torch.uint8:
            how = {"scale": scale, "block_sizes": {-1: 32}}
            made[name] = MXFP8QTensor(tensor.shape, BFLOAT16, tensor).dequantize(BFLOAT16, **how)
        else:
            scale = scale[:, None] if scale.ndim else scale
            made[name] = FP8QTensor(tensor.shape, BFLOAT16, tensor).dequantize(BFLOAT16, scale=scale)
    return {name: tensor.contiguous() for name, tensor in made.items()}


def main() -> None:
    """Quantize a folder."""
    kind, plain, out, expected = sys.argv[1], *map(Path, sys.argv[2:])
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=BFLOAT16)

    def calibrate(model: torch.nn.Module) -> None:
        with torch.inference_mode():
            model(torch.arange(256).view(8, 32))

    model = mtq.quantize(model, KINDS[kind], calibrate)
    export_hf_checkpoint(model, dtype=BFLOAT16, export_dir=out)
    for file in plain.glob("*token*"):
        shutil.copy(file, out)
    save_file(dequantized(load_file(out / "model.safetensors")), expected)
    print(json.loads((out / "hf_quant_config.json").read_text())["quantization"])


if __name__ == "__main__":
    main()
