"""Folders that llm-compressor quantizes with compressed-tensors, and the weights as the latter decompresses them.

    python -m tests.genuine.make_nvfp4 KIND PLAIN OUT EXPECTED
    python -m tests.genuine.make_nvfp4 plain FOLDER EXPECTED
    python -m tests.genuine.make_nvfp4 compress[-KIND] FILE EXPECTED
    python -m tests.genuine.make_nvfp4 pack PLAIN FOLDER EXPECTED

quantizes the folder PLAIN on a CPU, and writes the folder OUT, and the weights that it stands for to the file EXPECTED.
KIND is "NVFP4A16", or "mixed": attention in FP8 per channel, everything else in NVFP4. "plain" only does the latter.
"compress" compresses each weight of a file on its own, whatever it contains; "pack" those of the folder PLAIN that have
scales in FOLDER, with these and the settings there. Runs in "llm-compressor".
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from compressed_tensors.utils import match_name
from safetensors.torch import load_file, save_file

IGNORED = ["lm_head", "re:.*mlp.gate$", "re:.*visual.*"]
ATTENTION = ["re:.*self_attn.*_proj$"]


def quantize(kind: str, plain: Path, out: Path) -> None:
    """Quantize a folder without data."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    if kind == "mixed":
        presets = {"FP8_DYNAMIC": ATTENTION, "NVFP4A16": [r"re:.*mlp.*_proj$"]}
        recipe = QuantizationModifier(scheme=presets, ignore=IGNORED)
    else:
        recipe = QuantizationModifier(targets="Linear", scheme=kind, ignore=IGNORED)
    oneshot(model=model, recipe=recipe)
    model.save_pretrained(out, save_compressed=True)
    for file in plain.glob("*token*"):
        shutil.copy(file, out)


def decompressed(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a folder, each as the compressor of its group decompresses it."""
    stored = {name: part for file in folder.glob("*.safetensors") for name, part in load_file(file).items()}
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(settings)
    made, scales = {}, [name for name in stored if name.endswith(".weight_scale")]
    for module in (name.removesuffix(".weight_scale") for name in scales):
        parts = {
            name.rpartition(".")[2]: stored.pop(name)
            for name in [each for each in stored if each.rpartition(".")[0] == module]
        }
        scheme = _scheme_of(module, config)
        compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
        made[f"{module}.weight"] = compressor.decompress(parts, scheme)["weight"].contiguous()
    return stored | made


def compressed(file: Path, kind: str) -> dict[str, torch.Tensor]:
    """Each weight of a file as compressed-tensors compresses it, with the scales that it computes."""
    scheme = preset_name_to_scheme(kind, ["Linear"])
    compressor = BaseCompressor.get_value_from_registry(infer_module_format(torch.nn.Linear, scheme).value)
    made = {}
    for name, weight in load_file(file).items():
        groups = weight.unflatten(-1, (-1, scheme.weights.group_size))
        low, high = groups.amin(-1), groups.amax(-1)
        outer = generate_gparam(low.amin(), high.amax()) if kind.startswith("NV") else None
        scale, _ = calculate_qparams(low, high, scheme.weights, outer)
        parts = {"weight": weight, "weight_scale": scale.to(weight.dtype)}
        parts |= {} if outer is None else {"weight_global_scale": outer}
        for role, part in compressor.compress(parts, scheme).items():
            made[name.removesuffix("weight") + role] = part.contiguous()
    return made


def packed(plain: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Each weight of a plain folder as compressed-tensors compresses it with the scale that another folder has."""
    stored = {name: part for file in folder.glob("*.safetensors") for name, part in load_file(file).items()}
    weights = {name: part for file in plain.glob("*.safetensors") for name, part in load_file(file).items()}
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(settings)
    made = {}
    for name in [name for name in weights if f"{name}_scale" in stored]:
        scheme = _scheme_of(name.removesuffix(".weight"), config)
        compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
        parts = {"weight": weights.pop(name), "weight_scale": stored[f"{name}_scale"]}
        for role, part in compressor.compress(parts, scheme).items():
            made[name.removesuffix("weight") + role] = part.contiguous()
    return weights | made


def _scheme_of(module: str, config: QuantizationConfig) -> QuantizationScheme:
    schemes = config.config_groups.values()
    named = [each for each in schemes if any(match_name(module, target) for target in each.targets)]
    return (named or [each for each in schemes if "Linear" in each.targets])[0]


def main() -> None:
    """Quantize a folder, and decompress it."""
    kind, *paths = sys.argv[1], *map(Path, sys.argv[2:])
    if kind.startswith("compress"):
        save_file(compressed(paths[0], kind.removeprefix("compress-")), paths[1])
        return
    if kind == "pack":
        save_file(packed(*paths[:2]), paths[2])
        return
    if kind != "plain":
        quantize(kind, *paths[:2])
    save_file(decompressed(paths[-2]), paths[-1])


if __name__ == "__main__":
    main()
