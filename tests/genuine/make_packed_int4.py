"""Weights that compressed-tensors itself packs into 4 bits and unpacks again; runs in "compressed-tensors-0.12".

    python -m tests.genuine.make_packed_int4 KIND PLAIN OUT EXPECTED

quantizes the projections of the folder PLAIN, and writes the folder OUT, and the weights that the package unpacks from
it to the file EXPECTED. KIND is "channel", or "group" or "weight": columns are reordered, and groups stored or not.
Release 0.12.2 is the last one that wrote `weight_g_idx`.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors.quantized_compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file, save_file

GROUP = 16
PER_CHANNEL = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="channel")
"""One scale for each row."""


def per_group(order: str) -> QuantizationArgs:
    """One scale for each group of columns, which are ordered by their activations."""
    return QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP, actorder=order
    )


def main() -> None:
    """Quantize a folder."""
    kind, plain, out, expected = sys.argv[1], *map(Path, sys.argv[2:])
    settings = PER_CHANNEL if kind == "channel" else per_group(kind)
    draw = torch.Generator().manual_seed(0)
    compressor = PackedQuantizationCompressor()
    stored, unpacked = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = unpacked[name] = tensor
            continue
        rows, columns = tensor.shape
        scales = torch.rand(rows, 1 if kind == "channel" else columns // GROUP, generator=draw) / 50
        scales = scales.to(tensor.dtype)
        groups = torch.arange(columns) // GROUP
        g_idx = groups[torch.randperm(columns, generator=draw)].int() if kind == "group" else None
        parts = compressor.compress_weight(tensor, scales, settings, g_idx=g_idx)
        parts = {f"weight_{role.removeprefix('weight_')}": part for role, part in parts.items()}
        parts |= {"weight_scale": scales} | ({} if g_idx is None else {"weight_g_idx": g_idx})
        unpacked[name] = compressor.decompress_weight(parts, settings).contiguous()
        stored |= {f"{name.removesuffix('weight')}{role}": part for role, part in parts.items()}
    shutil.copytree(plain, out)
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    scheme = QuantizationScheme(targets=["Linear"], weights=settings)
    described = QuantizationConfig(config_groups={"group_0": scheme}, format="pack-quantized").to_dict()
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
    save_file(unpacked, expected)


if __name__ == "__main__":
    main()
