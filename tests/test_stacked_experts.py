"""Experts of Qwen3.5: stacked on the Hub, one by one as transformers saves them; both for MTP layers."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import reshard
from tests.genuine.model_types import make_model_type
from tests.judges import assert_same_tensors, tensors_of

PARTS = ("gate", "up", "down")


def test_experts_are_read_in_either_spelling_and_written_as_the_hub_has_them(tmp_path: Path) -> None:
    hub, other = make_model_type("qwen3_5_moe", tmp_path / "hub"), tmp_path / "other"
    shutil.copytree(hub, other)
    tensors = load_file(hub / "model.safetensors")
    for name in [name for name in tensors if name.endswith("experts.down_proj")]:
        prefix = name.removesuffix("down_proj")
        gate_up, down = tensors.pop(f"{prefix}gate_up_proj"), tensors.pop(name)
        for e in range(len(down)):
            for part, tensor in zip(PARTS, (*gate_up[e].chunk(2), down[e]), strict=True):
                tensors[f"{prefix}{e}.{part}_proj.weight"] = tensor.clone()
    prefix = "mtp.layers.0.mlp.experts."
    each = [[tensors.pop(f"{prefix}{e}.{part}_proj.weight") for part in PARTS] for e in range(4)]
    tensors[f"{prefix}gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in each])
    tensors[f"{prefix}down_proj"] = torch.stack([down for *_, down in each])
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert reshard.verify(other, hub).equal
    reshard.convert(other, tmp_path / "megatron", to="megatron", pp=2)
    reshard.convert(tmp_path / "megatron", tmp_path / "back")
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(hub))
