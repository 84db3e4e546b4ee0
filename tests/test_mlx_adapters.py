"""Adapters of mlx-lm (`formats/mlx/adapter.py`), judged by what mlx-lm itself fuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard.base.errors import ReshardError
from tests.judges import tensors_of
from tests.test_mlx import Model as MlxModel
from tests.test_mlx import hub, run

Model = Callable[..., Path]
NARROW = {"head_dim": 8}
SAVED: dict[str, tuple[MlxModel, dict[str, Any]]] = {
    "llama": (MlxModel("llama"), {}),
    "qwen3": (MlxModel("qwen3"), {"keys": ["self_attn.q_proj", "mlp.down_proj"]}),
    "dora": (MlxModel("llama_tied"), {"kind": "dora"}),
    "qwen3_moe": (MlxModel("qwen3_moe"), {}),
    "mixtral": (MlxModel("mixtral", NARROW), {}),
    "qwen2_moe": (MlxModel("qwen2_moe"), {"keys": ["mlp.switch_mlp.up_proj", "mlp.gate"]}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mlx")
    jobs = [
        {"do": "adapt", "folder": hub(model, folder / name), "out": folder / name, **options}
        for name, (model, options) in SAVED.items()
    ]
    jobs.append({"do": "adapt", "folder": folder / "llama/plain", "out": folder / "full", "kind": "full"})
    everything = {"keys": ["model.embed_tokens", "self_attn.q_proj"]}
    jobs.append({"do": "adapt", "folder": folder / "llama/plain", "out": folder / "embedding", **everything})
    run(folder, jobs)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_merged_as_mlx_lm_fuses(name: str, saved: Path, tmp_path: Path) -> None:
    place = saved / name
    reshard.convert(place / "adapters", tmp_path / "ours", merge=True, no_tokenizer=True)
    reshard.convert(place / "fused", tmp_path / "theirs", to="huggingface", no_tokenizer=True)
    ours, theirs, before = (
        tensors_of(each) for each in (tmp_path / "ours", tmp_path / "theirs", place / "plain")
    )
    assert ours.keys() == theirs.keys()
    changed = 0
    for key, expected in theirs.items():
        changed += not torch.equal(expected, before[key])
        assert (ours[key].float() - expected.float()).abs().max() <= 0.01 * expected.abs().max(), key
    assert changed >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "embedding"])
def test_what_is_no_pair_of_a_linear_is_refused_by_name(name: str, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match=r"mlx_lm\.fuse") as caught:
        reshard.convert(saved / name / "adapters", tmp_path / "ours", base=saved / "llama/plain", merge=True)
    assert {each.code for each in caught.value.problems} == {"mlx-adapter-unsupported"}


def adapter(base: Path, out: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """An adapter of two linears, and the weights that it makes, by the formula of mlx-lm."""
    weights, generator = tensors_of(base), torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    merged: dict[str, torch.Tensor] = {}
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        weight = weights[f"{module}.weight"]
        a = torch.randn(weight.shape[1], 4, generator=generator)
        b = torch.randn(4, weight.shape[0], generator=generator)
        tensors |= {f"{module}.lora_a": a, f"{module}.lora_b": b}
        merged[f"{module}.weight"] = weight + 5 * (a @ b).T
    out.mkdir()
    save_file(tensors, out / "adapters.safetensors")
    save_file(tensors, out / "0000100_adapters.safetensors")
    settings: dict[str, Any] = {"rank": 4, "scale": 5.0, "dropout": 0.0}
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": settings, "model": str(base)}
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out, merged


def test_it_is_merged_into_its_base(hf_model: Model, tmp_path: Path) -> None:
    source, merged = adapter(hf_model("llama"), tmp_path / "adapters")
    for path, out in (
        (source, tmp_path / "folder"),
        (source / "0000100_adapters.safetensors", tmp_path / "step"),
    ):
        reshard.convert(path, out, merge=True)
        ours = tensors_of(out)
        for name, expected in merged.items():
            assert torch.allclose(ours[name], expected, atol=1e-5), name
        assert reshard.verify(path, out, proof=True)


def test_it_becomes_an_adapter_of_peft(hf_model: Model, tmp_path: Path) -> None:
    source, merged = adapter(hf_model("llama"), tmp_path / "adapters")
    reshard.convert(source, tmp_path / "peft")
    reshard.convert(tmp_path / "peft", tmp_path / "ours", merge=True)
    ours = tensors_of(tmp_path / "ours")
    assert all(torch.allclose(ours[name], expected, atol=1e-5) for name, expected in merged.items())
    assert load_file(tmp_path / "peft/adapter_model.safetensors").keys() == {
        f"base_model.model.{name.removesuffix('weight')}lora_{side}.weight"
        for name in merged
        for side in "AB"
    }


def test_it_is_inspected_as_an_adapter(hf_model: Model, tmp_path: Path) -> None:
    source, _ = adapter(hf_model("llama"), tmp_path / "adapters")
    found = reshard.inspect(source)
    assert not found.problems and found.checkpoint.format == "mlx-adapter"
    assert any("rank 4, alpha 20" in note for note in found.notes)


def test_without_its_config_the_scale_is_asked_for(hf_model: Model, tmp_path: Path) -> None:
    base = hf_model("llama")
    source, merged = adapter(base, tmp_path / "adapters")
    (source / "adapter_config.json").unlink()
    with pytest.raises(ReshardError) as caught:
        reshard.convert(source, tmp_path / "ours", base=base, merge=True)
    assert {each.code for each in caught.value.problems} == {"lora-alpha-unknown"}
    reshard.convert(source, tmp_path / "ours", base=base, merge=True, lora_alpha=20)
    ours = tensors_of(tmp_path / "ours")
    assert all(torch.allclose(ours[name], expected, atol=1e-5) for name, expected in merged.items())
