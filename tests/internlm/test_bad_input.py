"""Errors in InternEvo's files are reported."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.base.errors import ReshardError
from reshard.formats.internlm.join_shards import InternEvoRank, ShardCollector
from tests.internlm.checkpoints import Copies, config_with, edit, problems_of

# ------------------------------------------------------------------------------------------- bad input


def test_a_tensor_that_differs_between_ranks_is_refused(copy_of: Copies, tmp_path: Path) -> None:
    folder = copy_of("internlm2-tp2pp2")
    key = "model.layers.1.ffn_norm.weight"
    edit(folder / "model_tp1_pp0.pt", lambda content: content | {key: content[key] + 1})
    found = problems_of(folder, tmp_path / "out")
    assert "layers.1.ffn_norm.weight" in found and "replicated tensors are equal on all ranks" in found


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("internlm2-tp2pp2", "model_tp0_pp1.pt"),
        ("llama-tp16", "model_tp7_pp0.pt"),
        ("internlm2-isp-tp2wp2pp2", "model_tp1_wp1_pp0.pt"),
    ],
)
def test_the_file_of_a_rank_that_is_missing_is_named(
    name: str, gone: str, copy_of: Copies, tmp_path: Path
) -> None:
    folder = copy_of(name)
    (folder / gone).unlink()
    found = problems_of(folder, tmp_path / "out")
    assert f"{folder}/{gone}" in found and "the file of a rank is missing" in found


@pytest.mark.parametrize(
    ("name", "gone", "message"),
    [
        ("llama-tp2", "model_tp1_*", "the files of some ranks are missing"),
        ("internlm2-isp", "model_tp0_wp1_*", "the files of some ranks are missing"),
        ("internlm2-tp2pp2", "model_tp*_pp1.pt", "the files of a pipeline stage are missing"),
        ("moe-tp2", "model_moe_layer1_expert2_tp1.pt", "a shard of a tensor is missing"),
        ("moe-tp2", "model_moe_layer1_expert2_*", "mlp.moe_layer.experts.2"),
    ],
)
def test_last_ranks_and_experts_that_are_missing_are_noticed(
    name: str, gone: str, message: str, copy_of: Copies, tmp_path: Path
) -> None:
    folder = copy_of(name)
    for file in folder.glob(gone):
        file.unlink()
    assert message in problems_of(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("internlm2-tp2pp2", "model_tp0_pp0.pt", "model_tp1_pp0.pt"),
        ("internlm2-isp", "model_tp0_wp0_pp0.pt", "model_tp0_wp1_pp0.pt"),
        ("llama-tp16", "model_tp3_pp0.pt", "model_tp12_pp0.pt"),
        ("moe-tp2", "model_moe_layer0_expert1_tp0.pt", "model_moe_layer0_expert1_tp1.pt"),
    ],
)
def test_a_rank_that_was_copied_over_another_is_named(
    name: str, first: str, second: str, copy_of: Copies, tmp_path: Path
) -> None:
    folder = copy_of(name)
    shutil.copy(folder / first, folder / second)
    found = problems_of(folder, tmp_path / "out")
    assert "is a copy of another rank's" in found and first in found and second in found


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("internlm2-tp2pp2", "model_tp0_pp0.pt", "model_tp0_pp1.pt"),
        ("internlm2-tp2pp2", "model_tp0_pp0.pt", "model_tp1_pp1.pt"),
        ("internlm2-chunks", "model_tp0_pp0.pt", "model_tp0_pp1.pt"),
        ("internlm2-isp-tp2wp2pp2", "model_tp1_wp1_pp0.pt", "model_tp0_wp0_pp1.pt"),
        ("internlm1-tp2", "model_tp0_pp0.pt", "model_tp1_pp0.pt"),
        ("internlm2-biases", "model_tp0_pp0.pt", "model_tp1_pp0.pt"),
        ("moe-tp2", "model_tp0_pp0.pt", "model_tp1_pp0.pt"),
        ("moe-tp2", "model_moe_layer0_expert1_tp0.pt", "model_moe_layer0_expert2_tp0.pt"),
        ("moe-tp2", "model_moe_layer0_expert1_tp1.pt", "model_moe_layer1_expert1_tp1.pt"),
    ],
)
def test_files_of_two_ranks_that_were_exchanged(
    name: str, first: str, second: str, copy_of: Copies, tmp_path: Path
) -> None:
    """Found by tensors that only one of the two saves: embedding, head, one rank's bias, the expert's number."""
    folder = copy_of(name)
    assert reshard.open(folder).checkpoint.problems == []
    (folder / first).rename(folder / "spare")
    (folder / second).rename(folder / first)
    (folder / "spare").rename(folder / second)
    found = problems_of(folder, tmp_path / "out")
    assert found.startswith("a file belongs to another rank") and (first in found or second in found)


def test_shards_that_are_not_equal_are_refused(copy_of: Copies, tmp_path: Path) -> None:
    folder, key = copy_of("llama-tp2"), "model.layers.0.feed_forward.w1.weight"
    edit(folder / "model_tp1_pp0.pt", lambda content: content | {key: content[key][:10].clone()})
    found = problems_of(folder, tmp_path / "out")
    assert "not equal in size" in found and "layers.0.feed_forward.w1.weight" in found
    assert "[24, 32], [10, 32]" in found


@pytest.mark.parametrize("switch", ["norm_head", "apply_post_layer_norm", "is_reward", "moe_use_residual"])
def test_models_that_no_hub_model_computes_are_refused(switch: str, copy_of: Copies, tmp_path: Path) -> None:
    folder = copy_of("internlm2-isp")
    config_with(folder, **{switch: True})
    assert f"{switch}=True" in problems_of(folder, tmp_path / "out")


def test_files_of_fsdp_are_refused_with_the_way_out(copy_of: Copies, tmp_path: Path) -> None:
    folder = copy_of("llama-tp2")
    for file in folder.glob("model_tp*_pp0.pt"):
        file.rename(file.with_name(f"{file.stem}_dp0.pt"))
    assert "zero1=dict(fsdp=False)" in problems_of(folder, tmp_path / "out")


def test_experts_of_two_stages_in_one_file_are_noticed() -> None:
    shards = ShardCollector()
    for stage, layers in enumerate((1, 2, 2)):
        state = {
            f"model.blocks.{i}.norm1.weight": reshard.formats.checkpoint.Tensor(None, _ones())
            for i in range(layers)
        }
        shards.count(InternEvoRank(0, None, stage), state)
    with pytest.raises(ReshardError, match="saved under one name"):
        shards.stage_of_experts(2, Path("model_moe_layer2_expert0_tp0.pt"))


def _ones() -> Any:
    return reshard.algebra.views.View.of("x", 8)


@pytest.mark.parametrize("content", [b"no archive", b""])
def test_files_that_are_none_are_refused(content: bytes, copy_of: Copies, tmp_path: Path) -> None:
    folder = copy_of("llama-tp2")
    (folder / "model_tp1_pp0.pt").write_bytes(content)
    assert "model_tp1_pp0.pt" in problems_of(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("blocks.0.mixer.Wqkv.weight", (47, 32)),
        ("blocks.0.mixer.out_proj.weight", (16,)),
        ("blocks.0.norm1.weight", ()),
        ("embedding.weight", ()),
        ("blocks.1.mlp.w2.weight", (3, 4, 5)),
        ("head.weight", (0,)),
    ],
)
def test_tensors_of_any_shape_are_refused_without_a_traceback(
    key: str, shape: tuple[int, ...], copy_of: Copies, tmp_path: Path
) -> None:
    folder = copy_of("internlm1-tp2")
    for file in folder.glob("model_tp*.pt"):
        edit(file, lambda content: content | {f"model.{key}": torch.zeros(shape)})
    problems_of(folder, tmp_path / "out")


@pytest.mark.parametrize(
    "gone", ["model.embedding.weight", "model.norm.weight", "model.blocks.0.mlp.w1.weight"]
)
def test_a_tensor_that_all_ranks_lack_is_missed(gone: str, copy_of: Copies, tmp_path: Path) -> None:
    folder = copy_of("internlm1-tp2")
    for file in folder.glob("model_tp*.pt"):
        edit(file, lambda content: {key: tensor for key, tensor in content.items() if key != gone})
    assert "missing" in problems_of(folder, tmp_path / "out")


def test_a_file_without_tensors_is_refused(copy_of: Copies, tmp_path: Path) -> None:
    folder = copy_of("llama-tp2")
    torch.save([1, 2], folder / "model_tp1_pp0.pt")
    assert "not the weights of a rank" in problems_of(folder, tmp_path / "out")
    torch.save([1, 2], folder / "model_config.pt")
    assert "model_config.pt cannot be read" in problems_of(folder, tmp_path / "out")
