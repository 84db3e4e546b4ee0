"""Files of DeepSeek's inference code become the model again that `inference/convert.py` made them from.

`tests/genuine/make_deepseek.py` ran that script on random models, and kept digests of their weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import reshard
from reshard.base.errors import ReshardError
from tests.genuine.make_deepseek import digest
from tests.judges import tensors_of

DATA = Path(__file__).parents[1] / "data" / "deepseek_inference"
NAMES = ("v2", "v3", "v3-fp8", "v3.2")
FIRST, SECOND = "model0-mp2.safetensors", "model1-mp2.safetensors"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "v3.2", tmp_path / "src"))


def problems_of(folder: Path) -> list[str]:
    with pytest.raises(ReshardError) as raised:
        reshard.convert(folder, folder.parent / "out", no_tokenizer=True)
    return [problem.code for problem in raised.value.problems]


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_has_the_bits_that_it_had(name: str, tmp_path: Path) -> None:
    done = reshard.convert(DATA / name, tmp_path / "out", no_tokenizer=True)
    found = {key: digest(tensor) for key, tensor in tensors_of(tmp_path / "out").items()}
    assert found == json.loads((DATA / name / "digests.json").read_text())
    assert any("layer 61" in note for note in done.plan.notes) == (name == "v3")


@pytest.mark.parametrize(("name", "model_type"), [("v3", "deepseek_v3"), ("v3.2", "deepseek_v32")])
def test_the_config_is_that_of_the_settings(name: str, model_type: str, tmp_path: Path) -> None:
    reshard.convert(DATA / name, tmp_path / "out", no_tokenizer=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = {
        "model_type": model_type,
        "n_group": 2,
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "max_position_embeddings": 163840,
        "num_nextn_predict_layers": 0,
        "first_k_dense_replace": 60 if name == "v3" else 1,
    }
    assert wanted.items() <= config.items()
    assert ("index_topk" in config) == (name == "v3.2")
    assert AutoConfig.from_pretrained(tmp_path / "out").hidden_size == 16


def test_the_config_of_a_softmax_router(tmp_path: Path) -> None:
    reshard.convert(DATA / "v2", tmp_path / "out", no_tokenizer=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = {
        "model_type": "deepseek_v2",
        "norm_topk_prob": False,
        "topk_method": "greedy",
        "q_lora_rank": None,
    }
    assert wanted.items() <= config.items()
    assert config["rope_scaling"]["mscale_all_dim"] == 0.707


def test_fp8_is_dequantized_with_its_scales(tmp_path: Path) -> None:
    reshard.convert(DATA / "v3-fp8", tmp_path / "fp8", no_tokenizer=True)
    reshard.convert(DATA / "v3-fp8", tmp_path / "out", dtype="bfloat16", no_tokenizer=True)
    name = "model.layers.0.self_attn.o_proj.weight"
    before, after = (tensors_of(tmp_path / each) for each in ("fp8", "out"))
    scales = before[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(after[name], (before[name].float() * scales).bfloat16())
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert (config["weight_block_size"], config["scale_fmt"]) == ([128, 128], "ue8m0")


@pytest.mark.parametrize("name", ["config.json", "config_671B.json"])
def test_settings_under_any_name(name: str, tmp_path: Path) -> None:
    source = Path(shutil.copytree(DATA / "v3-fp8", tmp_path / "src"))
    (source / "config_v3-fp8.json").rename(source / name)
    reshard.convert(source, tmp_path / "out", no_tokenizer=True)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.hidden_size, config.dtype) == (256, torch.bfloat16)


def test_a_base_has_the_config(copy: Path, tmp_path: Path) -> None:
    reshard.convert(copy, tmp_path / "base", no_tokenizer=True)
    (copy / "config_v3.2.json").unlink()
    assert problems_of(copy) == ["config-not-beside-checkpoint"]
    reshard.convert(copy, tmp_path / "out", base=tmp_path / "base", no_tokenizer=True)
    assert reshard.verify(tmp_path / "out", tmp_path / "base").equal


def test_missing_ranks_are_named(copy: Path) -> None:
    (copy / FIRST).unlink()
    assert problems_of(copy) == ["rank-file-missing"]


def test_swapped_and_copied_ranks_are_noticed(copy: Path) -> None:
    (copy / FIRST).rename(copy / "away")
    (copy / SECOND).rename(copy / FIRST)
    (copy / "away").rename(copy / SECOND)
    assert problems_of(copy) == ["deepseek-rank-misplaced"] * 2
    shutil.copy(copy / FIRST, copy / SECOND)
    assert problems_of(copy) == ["deepseek-rank-misplaced"]


def test_files_of_two_conversions_are_not_mixed(copy: Path) -> None:
    shutil.copy(copy / FIRST, copy / "model0-mp1.safetensors")
    assert problems_of(copy) == ["deepseek-saves-mixed"]


def test_weights_that_differ_between_ranks(copy: Path) -> None:
    found = load_file(copy / SECOND)
    found["layers.0.attn.wq_a.weight"][0] += 1
    save_file(found, copy / SECOND)
    assert problems_of(copy) == ["copies-differ"]


def test_names_that_nobody_has(copy: Path) -> None:
    for name in (FIRST, SECOND):
        found = load_file(copy / name)
        found["layers.0.attn.wx.weight"] = torch.ones(2, 2)
        save_file(found, copy / name)
    assert "tensor-unknown" in problems_of(copy)
