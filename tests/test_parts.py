"""Safetensors with each rank's parts of the tensors, as torch's HuggingFaceStorageWriter saves them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

import reshard
from reshard.base.errors import ReshardError
from tests.genuine.make_dcp import live_model, shard, split
from tests.genuine.ranks import on_ranks
from tests.judges import assert_same_tensors, tensors_of

Models = Callable[..., Path]
RANKS = 4


def save(rank: int, source: Path, folder: Path, files: int) -> None:
    """Save on two FSDP ranks of two tensor-parallel ranks each."""
    model = live_model(source)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    split(model, mesh["tp"])
    shard(model, mesh["dp"])
    state = model.state_dict()
    numbers = {name: 1 + index % files for index, name in enumerate(state)}
    writer = dcp.HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=numbers, save_distributed=True)
    dcp.save(state, storage_writer=writer)


@pytest.fixture(scope="module", params=[1, 2])
def saved(request: pytest.FixtureRequest, hf_model: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that four ranks saved, in one file each or in two, with the config beside."""
    source, folder = hf_model("qwen3"), tmp_path_factory.mktemp("parts") / "saved"
    folder.mkdir()
    on_ranks(RANKS, save, source, folder, request.param)
    shutil.copyfile(source / "config.json", folder / "config.json")
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def refused(path: Path) -> ReshardError:
    with pytest.raises(ReshardError) as caught:
        reshard.convert(path, path.parent / "none", to="huggingface", no_tokenizer=True)
    assert not (path.parent / "none").exists()
    assert not any(re.search("remove|delete the", problem.remedy or "") for problem in caught.value.problems)
    return caught.value


@pytest.mark.core("2")
def test_parts_are_put_together(saved: Path, hf_model: Models, tmp_path: Path) -> None:
    files = sorted(saved.glob("*.safetensors"))
    assert any(len(load_file(files[0])[name].shape) == 2 for name in load_file(files[0]))
    wanted = {name: tensor.float() for name, tensor in tensors_of(hf_model("qwen3")).items()}
    done = reshard.convert(saved, tmp_path / "out", to="huggingface", no_tokenizer=True)
    assert_same_tensors(tensors_of(tmp_path / "out"), wanted)
    assert any("4 ranks" in note for note in reshard.inspect(saved).notes)
    assert done.plan.tensors == len(wanted)
    assert reshard.verify(saved, tmp_path / "out").equal


@pytest.mark.core("1")
def test_torch_puts_the_same_together(saved: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    names = {name for file in saved.glob("*.safetensors") for name in load_file(file)}
    (tmp_path / "theirs").mkdir()
    consolidate_safetensors_files(str(saved), str(tmp_path / "theirs"), dict.fromkeys(names, 1))
    reshard.convert(saved, tmp_path / "ours", to="huggingface", no_tokenizer=True)
    assert_same_tensors(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs"))


@pytest.mark.parametrize("rank", range(1, RANKS + 1))
def test_a_rank_that_is_missing(rank: int, copy: Path) -> None:
    for file in copy.glob(f"shard-0000{rank}-*"):
        file.unlink()
    refused(copy)


def test_a_file_of_a_rank_alone(copy: Path) -> None:
    error = refused(sorted(copy.glob("shard-*"))[0])
    assert error.problems[0].code == "part-alone" and error.problems[0].remedy == "pass the folder"


def test_parts_that_are_there_twice(copy: Path) -> None:
    first = sorted(copy.glob("shard-*"))[0]
    shutil.copyfile(first, copy / first.name.replace("shard-00001", "shard-00009"))
    assert {problem.code for problem in refused(copy).problems} == {"parts-overlap"}


def test_parts_of_another_dtype(copy: Path) -> None:
    last = sorted(copy.glob("shard-*"))[-1]
    rewrite(last, {name: tensor.bfloat16() for name, tensor in load_file(last).items()})
    assert {problem.code for problem in refused(copy).problems} == {"parts-unlike"}


@pytest.mark.parametrize("info", ["{", "{}", '{"NAME": {"saved_offsets": [-1, 0]}}', "[]"])
def test_offsets_that_cannot_be_read(info: str, copy: Path) -> None:
    last = sorted(copy.glob("shard-*"))[-1]
    tensors = load_file(last)
    rewrite(last, tensors, info.replace("NAME", min(tensors)))
    assert "part-offsets-unreadable" in {problem.code for problem in refused(copy).problems}


def test_a_file_without_offsets_among_them(copy: Path) -> None:
    last = sorted(copy.glob("shard-*"))[-1]
    save_file(load_file(last), last, metadata={"format": "pt"})
    (first, *_) = refused(copy).problems
    assert first.code == "tensor-in-two-files" and "delete nothing" in (first.remedy or "")


def rewrite(file: Path, tensors: dict[str, torch.Tensor], info: str | None = None) -> None:
    """Save other tensors with the metadata of `file`, or with these offsets."""
    content = file.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    metadata = header["__metadata__"] | ({"DCP_SHARDING_INFO": info} if info else {})
    save_file(tensors, file, metadata=metadata)
