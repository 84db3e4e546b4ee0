"""Parts outside the language model: copied as the base has them, or refused; and towers of Megatron's own modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard.base.errors import ReshardError
from reshard.containers.dcp_metadata import read_metadata
from reshard.transfer.source_files import Sources
from tests.genuine.model_types import make_model_type
from tests.genuine.tiny_configs import QWEN3_VISION
from tests.judges import assert_same_tensors, tensors_of
from tests.test_dcp_format import as_torch_reads

DEEP = {**QWEN3_VISION, "depth": 3, "num_heads": 2, "deepstack_visual_indexes": [0, 2]}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_type("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl") / "hub", vision_config=DEEP)


def renamed(source: Path, folder: Path, was: str, now: str) -> Path:
    """A copy of a Hugging Face folder with another name of one tensor."""
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    tensors[now] = tensors.pop(was)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    return folder


def test_a_tower_of_megatrons_modules(qwen: Path, tmp_path: Path) -> None:
    """Layers are stacked, and the rows of queries, keys and values in the order of heads."""
    there = tmp_path / "there"
    reshard.convert(qwen, there, to="megatron", engine="megatron-bridge", tp=2)
    theirs, hub = as_torch_reads(there / "release"), tensors_of(qwen)
    fused = theirs["vision_model.decoder.layers.self_attention.linear_qkv.weight"]
    for layer in range(3):
        parts = hub[f"model.visual.blocks.{layer}.attn.qkv.weight"].view(3, 2, 8, 16)
        assert torch.equal(fused[layer], parts.transpose(0, 1).reshape(48, 16))
    norms = [hub[f"model.visual.deepstack_merger_list.{at}.norm.bias"] for at in range(2)]
    assert torch.equal(
        theirs["vision_model.decoder.deepstack_merger_list.patch_norm.bias"], torch.stack(norms)
    )
    objects = read_metadata(there / "release" / ".metadata", Sources()).objects
    states = [f"vision_model.decoder.layers.mlp.linear_fc2._extra_state/shard_{at}_3" for at in range(3)]
    assert {*states, "vision_model.merger.linear_fc1._extra_state/shard_0_1"} <= objects.keys()
    reshard.convert(there, tmp_path / "back", base=qwen)
    assert_same_tensors(tensors_of(tmp_path / "back"), hub)


def test_only_what_the_base_has_is_copied(qwen: Path, tmp_path: Path) -> None:
    was, now = "model.visual.merger.norm.weight", "model.visual.merger.patch_norm.weight"
    other = renamed(qwen, tmp_path / "other", was, now)
    reshard.convert(qwen, tmp_path / "dcp", to="dcp")
    for source in (qwen, tmp_path / "dcp"):
        with pytest.raises(ReshardError, match="differs from the base") as refused:
            reshard.convert(source, tmp_path / "out", to="megatron", base=other)
        assert {problem.tensor for problem in refused.value.problems} == {was, now}
    (other / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    reshard.convert(tmp_path / "dcp", tmp_path / "out", to="megatron", base=other)


def test_megatrons_modules_under_a_prefix_of_transformers_are_refused(tmp_path: Path) -> None:
    base = make_model_type("qwen2_5_vl", tmp_path / "base")
    name = "visual.blocks.0.self_attention.linear_qkv.weight"
    other = renamed(base, tmp_path / "other", "visual.blocks.0.attn.qkv.weight", name)
    reshard.convert(other, tmp_path / "there", to="megatron", engine="megatron-bridge")
    (tmp_path / "there" / "config.json").write_bytes((base / "config.json").read_bytes())
    with pytest.raises(ReshardError, match="a tensor is unknown") as refused:
        reshard.convert(tmp_path / "there", tmp_path / "out")
    assert [problem.tensor for problem in refused.value.problems] == [name]
