"""Quantized folders by the tools that make them; runs in the environment "quantizers".

python -m tests.genuine.make_quantized KIND PLAIN OUT      quantize the folder PLAIN
python -m tests.genuine.make_quantized logits FOLDER FILE  what transformers computes from a folder
python -m tests.genuine.make_quantized plain FOLDER FILE   the weights as compressed-tensors decompresses them
python -m tests.genuine.make_quantized KIND-plain FOLDER FILE, of awq, gptq, nf4, fp4, int8: as their packages do
python -m tests.genuine.make_quantized FORMAT-BITS[-asym] PLAIN OUT   what auto-round itself saves; gptq-plain reads it
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, CompressedTensorsConfig

GROUP = 16
SKIPPED = ["lm_head", "re:.*mlp.gate$"]


def compressed(preset: str) -> Callable[[Path, Path], None]:
    """A scheme of compressed-tensors, by its name there. Each weight is its own calibration data."""

    def make(plain: Path, out: Path) -> None:
        model = _load(plain)
        scheme = preset_name_to_scheme(preset, targets=["Linear"])
        if scheme.weights.group_size:
            scheme.weights.group_size = GROUP
        apply_quantization_config(
            model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=SKIPPED)
        )
        for module in model.modules():
            if hasattr(module, "weight_scale"):
                _calibrate(module)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(out)
        compressor.update_config(out)

    return make


def _calibrate(module: Any) -> None:
    settings = module.quantization_scheme.weights
    if hasattr(module, "weight_global_scale"):
        module.weight_global_scale.data.fill_(1.0)
    if settings.group_size:
        scale, zero = compute_dynamic_scales_and_zp(module.weight, settings, module)
    else:
        rows = module.weight.reshape(module.weight_scale.numel(), -1)
        low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        scale, zero = calculate_qparams(low, high, settings)
    for name, values in (("weight_scale", scale), ("weight_zero_point", zero)):
        if hasattr(module, name):
            there = getattr(module, name)
            there.data = values.to(there.dtype).reshape(there.shape)
    module.quantization_status = QuantizationStatus.FROZEN


def bitsandbytes(**settings: Any) -> Callable[[Path, Path], None]:
    """A model that bitsandbytes quantized on loading, saved by transformers."""

    def make(plain: Path, out: Path) -> None:
        _load(plain, quantization_config=BitsAndBytesConfig(**settings), device_map="cpu").save_pretrained(
            out
        )

    return make


def awq(plain: Path, out: Path) -> None:
    """AutoAWQ's packed linear layers. Its search for scales needs a GPU; here each group has its own scale."""
    from awq.modules.linear.gemm import WQLinear_GEMM

    def pack(linear: torch.nn.Linear, scales: torch.Tensor, zeros: torch.Tensor) -> torch.nn.Module:
        return WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.T, zeros=zeros.T)

    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    _packed(plain, out, pack, settings)


def gptq(plain: Path, out: Path) -> None:
    """auto-round's packed linear layers in the format of AutoGPTQ."""
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    def pack(linear: torch.nn.Linear, scales: torch.Tensor, zeros: torch.Tensor) -> torch.nn.Module:
        # Like AutoGPTQ, with a bias of zeros where the model has none.
        packed = QuantLinear(4, GROUP, linear.in_features, linear.out_features, True, g_idx=True)
        packed.pack(linear, scales, zeros)
        return packed

    _packed(plain, out, pack, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False})


def auto_round(how: str, bits: int, *, symmetric: bool) -> Callable[[Path, Path], None]:
    """A model that auto-round rounds to the nearest on a CPU, and saves in one of its formats."""

    def make(plain: Path, out: Path) -> None:
        from auto_round import AutoRound
        from transformers import AutoTokenizer

        settings = {"bits": bits, "group_size": 32, "sym": symmetric, "iters": 0, "disable_opt_rtn": True}
        tokenizer = AutoTokenizer.from_pretrained(plain)
        rounding = AutoRound(_load(plain), tokenizer, device_map="cpu", **settings)
        rounding.quantize_and_save(str(out) + ".all", format=how)
        (made,) = [file.parent for file in Path(f"{out}.all").rglob("config.json")]
        made.rename(out)

    return make


def _packed(plain: Path, out: Path, pack: Callable[..., torch.nn.Module], settings: dict[str, Any]) -> None:
    model = _load(plain).to(torch.float16)
    for name, linear in list(model.named_modules()):
        if name.endswith("_proj"):
            groups = linear.weight.data.view(linear.out_features, -1, GROUP)
            scales = ((groups.amax(2) - groups.amin(2)) / 15).clamp(min=1e-4)
            zeros = (-groups.amin(2) / scales).round().clamp(0, 15)
            model.set_submodule(name, pack(linear, scales, zeros))
    model.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def _load(folder: Path, **settings: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **settings)


def logits(folder: Path, file: Path) -> None:
    """Logits of the first tokens of the vocabulary. With gradients; else bitsandbytes needs rows of whole blocks."""
    found = _load(folder, device_map="cpu")(torch.arange(24).view(2, 12)).logits
    np.save(file, found.detach().float().numpy())


def plain(folder: Path, out: Path) -> None:
    """The weights of a folder as compressed-tensors decompresses them, by name, in one file."""
    from safetensors.torch import save_file

    kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    settings = CompressedTensorsConfig(run_compressed=False)
    model = kind.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=settings, device_map="cpu")
    # Copies, because a tied head is the same tensor.
    save_file({name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}, out)


def awq_plain(folder: Path, out: Path) -> None:
    """The weights as AutoAWQ unpacks them, by name, in float16."""
    from awq.utils.packing_utils import dequantize_gemm
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    for name in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        parts = [tensors.pop(f"{name}.{part}") for part in ("qweight", "qzeros", "scales")]
        tensors[f"{name}.weight"] = dequantize_gemm(*parts, 4, GROUP).T.contiguous()
    save_file(tensors, out)


def gptq_plain(folder: Path, out: Path) -> None:
    """The weights that auto-round's layer multiplies with: its output for the rows of an identity."""
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp
    from safetensors.torch import load_file, save_file

    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    bits, group = settings["bits"], settings["group_size"]
    is_raw = settings.get("packing_format") == "auto_round"
    kind = (qlinear_torch if is_raw else qlinear_torch_zp).QuantLinear
    tensors = {name: part for file in folder.glob("*.safetensors") for name, part in load_file(file).items()}
    for name in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        parts = {part: tensors.pop(f"{name}.{part}") for part in ("qweight", "qzeros", "scales")}
        g_idx, bias = tensors.pop(f"{name}.g_idx", None), tensors.pop(f"{name}.bias", None)
        rows, columns = parts["qweight"].shape[0] * 32 // bits, parts["scales"].shape[1]
        pieces = []
        for at in range(0, columns, 32):  # with g_idx, it multiplies with no more columns than there are rows
            layer = kind(bits, group, rows, 32, False, g_idx=g_idx is not None)
            if g_idx is not None:
                layer.g_idx = g_idx
            layer.qweight, layer.scales = parts["qweight"][:, at : at + 32], parts["scales"][:, at : at + 32]
            layer.qzeros = parts["qzeros"][:, at * bits // 32 : (at + 32) * bits // 32]
            pieces.append(layer(torch.eye(rows, dtype=torch.float16)).T)
        tensors[f"{name}.weight"] = torch.cat(pieces)
        if bias is not None and bias.any():
            tensors[f"{name}.bias"] = bias
    save_file(tensors, out)


def bnb_plain(folder: Path, out: Path) -> None:
    """The weights as bitsandbytes dequantizes them, by name, in bfloat16."""
    from bitsandbytes.functional import QuantState, dequantize_4bit, int8_vectorwise_dequant
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".SCB")]:
        module = name.removesuffix("SCB")
        weight = int8_vectorwise_dequant(tensors[f"{module}weight"], tensors.pop(name))
        tensors[f"{module}weight"] = weight.to(torch.bfloat16)
        tensors.pop(f"{module}weight_format")
    for name in [name.removesuffix(".absmax") for name in tensors if name.endswith(".weight.absmax")]:
        parts = {key: tensors.pop(key) for key in list(tensors) if key.startswith(f"{name}.")}
        state = QuantState.from_dict({key.removeprefix(f"{name}."): t for key, t in parts.items()}, "cpu")
        tensors[name] = dequantize_4bit(tensors[name], state)
    save_file(tensors, out)


KINDS: dict[str, Callable[[Path, Path], None]] = {
    **{
        name: compressed(name)
        for name in ("W4A16", "W4A16_ASYM", "W3A16", "W8A8", "FP8", "FP8_DYNAMIC", "NVFP4A16")
    },
    "nf4": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "fp4": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_quant_storage="bfloat16"),
    "int8": bitsandbytes(load_in_8bit=True),
    **{
        f"{how}-{bits}{'' if symmetric else '-asym'}": auto_round(how, bits, symmetric=symmetric)
        for how in ("auto_round", "auto_gptq")
        for bits in (2, 3, 5, 8)
        for symmetric in (True, False)
    },
    "awq": awq,
    "gptq": gptq,
    "logits": logits,
    "plain": plain,
    "awq-plain": awq_plain,
    "gptq-plain": gptq_plain,
    **dict.fromkeys(("nf4-plain", "fp4-plain", "int8-plain"), bnb_plain),
}

if __name__ == "__main__":
    kind, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    KINDS[kind](source, target)
    if kind != "logits" and "plain" not in kind:
        for file in source.glob("*token*"):
            shutil.copy(file, target)
