"""Folders that ModelOpt itself quantizes and exports, and what its own classes make of them; in "modelopt".

    python -m tests.genuine.make_modelopt KIND PLAIN OUT EXPECTED

quantizes the folder PLAIN, exports the folder OUT, and writes the weights that the package dequantizes from it to the
file EXPECTED, in bfloat16. KIND is one of `KINDS`. The search of AWQ for factors of inputs needs a GPU; here they are
random.
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
from modelopt.torch.quantization.model_calib import (
    apply_pre_quant_scale_and_smooth,
    disable_pre_quant_scale_and_resmooth,
)
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor
from modelopt.torch.quantization.utils import is_quantized_linear
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
    "NVFP4_AWQ": mtq.NVFP4_DEFAULT_CFG,
    "W4A16_NVFP4": mtq.W4A16_NVFP4_CFG,
    "W4A8_NVFP4_FP8": mtq.W4A8_NVFP4_FP8_CFG,
    "FP8": mtq.FP8_DEFAULT_CFG,
    "FP8_PER_CHANNEL": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
    "MXFP8": mtq.MXFP8_DEFAULT_CFG,
    "mixed": mixed(),
}


def smooth(model: torch.nn.Module) -> None:
    """Give each linear layer factors of its inputs, as AWQ does."""
    draw = torch.Generator().manual_seed(0)
    for module in model.modules():
        if is_quantized_linear(module) and module.weight_quantizer.is_enabled:
            inputs = module.input_quantizer  # whose largest value was collected of all inputs, not of each
            inputs._amax_for_smoothing = inputs.amax.expand(module.in_features).clone()
            factors = torch.rand(module.in_features, generator=draw) + 0.5
            apply_pre_quant_scale_and_smooth(module, factors.to(BFLOAT16))


def resmoothed(weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """A weight with the factors of its inputs, by the function of the package."""
    linear = torch.nn.Linear(*weight.T.shape, bias=False, dtype=BFLOAT16)
    linear.weight.data = weight.clone()
    model = mtq.quantize(torch.nn.Sequential(linear), mtq.NVFP4_DEFAULT_CFG)
    model[0].input_quantizer.pre_quant_scale = factors
    disable_pre_quant_scale_and_resmooth(model[0])
    return model[0].weight.detach()


def of_nvfp4(packed: torch.Tensor, scale: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    """A weight of NVFP4; stacked experts are transposed."""
    if is_stacked := packed.ndim == 3:
        packed, scale = packed.transpose(1, 2), scale.transpose(1, 2)
    shape = torch.Size((*packed.shape[:-1], 2 * packed.shape[-1]))
    how = {"scale": scale, "double_scale": outer, "block_sizes": {-1: shape[-1] // scale.shape[-1]}}
    weight = NVFP4QTensor(shape, BFLOAT16, packed).dequantize(BFLOAT16, **how)
    return weight.transpose(1, 2) if is_stacked else weight


def dequantized(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All weights in bfloat16, by the class that has the form in which each is stored."""
    made = {}
    for name, tensor in stored.items():
        if name.endswith(("_scale", "_scale_2")):
            continue
        module = name if name.endswith("_proj") else name.removesuffix(".weight")
        role = f"{name}_weight" if name.endswith("_proj") else name
        scale, outer = stored.get(f"{role}_scale"), stored.get(f"{role}_scale_2")
        factors = stored.get(f"{module}.pre_quant_scale")
        if scale is None:
            made[name] = tensor
        elif outer is not None:
            weight = of_nvfp4(tensor, scale, outer)
            made[name] = weight if factors is None else resmoothed(weight, factors)
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
    if kind == "NVFP4_AWQ":
        smooth(model)
    export_hf_checkpoint(model, dtype=BFLOAT16, export_dir=out)
    for file in plain.glob("*token*"):
        shutil.copy(file, out)
    save_file(dequantized(load_file(out / "model.safetensors")), expected)
    print(json.loads((out / "hf_quant_config.json").read_text())["quantization"])


if __name__ == "__main__":
    main()
