"""Damaged files, inconsistent ranks, pickles with code in them."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from tests.bad_input.damage import (
    MEGATRON,
    Copy,
    convert,
    converted,
    cut,
    edit_rank,
    find,
    flip,
    refusal,
    refused,
    replace_folder,
)
from tests.commandline import reshard

# ------------------------------------------------------------------------------ files that are damaged


def test_a_missing_shard(copy: Copy) -> None:
    src = copy("sharded")
    shard = find(src, "model-00002-of-*")
    shard.unlink()
    problem = refusal(*convert(src, *MEGATRON))
    assert problem["message"] == "a shard is missing" and problem["file"] == str(shard)
    assert "model.safetensors.index.json" in problem["rule"]


@pytest.mark.parametrize("share", [0, 0.00001, 0.001, 0.5, 0.99999])
def test_a_truncated_safetensors_file(copy: Copy, share: float) -> None:
    file = cut(find(copy("qwen3"), "model.safetensors"), share)
    problem = refusal(*convert(file.parent, *MEGATRON))
    assert problem["file"] == str(file) and "copy or download the file again" in problem["remedy"]
    assert problem["message"] in ("incomplete safetensors file", "the file is cut short")


@pytest.mark.parametrize("share", [0, 0.001, 0.3, 0.9, 0.9999])
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("torch_dist", "__1_0.distcp"),
        ("torch_dist", "common.pt"),
        ("torch_dist", ".metadata"),
        ("legacy", "mp_rank_01_000/model_optim_rng.pt"),
    ],
)
def test_a_truncated_file_of_megatron(copy: Copy, name: str, file: str, share: float) -> None:
    path = cut(next((copy(name) / "release").glob(file)), share)
    problem = refusal(*convert(path.parents[2] if name == "legacy" else path.parents[1]))
    assert problem["file"] == str(path)
    assert "copy" in problem["remedy"]


def test_a_truncated_pytorch_model(copy: Copy) -> None:
    src = copy("qwen3")
    tensors = {name: torch.from_numpy(array) for name, array in load_file(src / "model.safetensors").items()}
    (src / "model.safetensors").unlink()
    torch.save(tensors, src / "pytorch_model.bin")
    converted(src, src.parent / "whole", *MEGATRON)
    cut(src / "pytorch_model.bin", 0.6)
    assert refusal(*convert(src, *MEGATRON))["message"] == "a file was cut short"


def test_the_folder_of_a_rank_is_missing(copy: Copy) -> None:
    src = copy("legacy")
    for rank in ("00_000", "01_001"):
        shutil.rmtree(src / "release" / f"mp_rank_{rank}")
    problems = refused(*convert(src))
    assert [problem["file"] for problem in problems] == [
        str(src / "release" / f"mp_rank_{rank}" / "model_optim_rng.pt") for rank in ("00_000", "01_001")
    ]
    assert problems[0]["message"] == "the file of a rank is missing"
    assert "TP2 · PP2 has 4 files" in problems[0]["rule"] and problems[0]["found"] == "2 files"


def test_the_file_of_a_rank_is_missing(copy: Copy) -> None:
    src = copy("torch_dist")
    find(src, "__1_0.distcp").unlink()
    problem = refusal(*convert(src))
    assert problem["file"].endswith("__1_0.distcp") and "named in .metadata" in problem["rule"]


@pytest.mark.parametrize("name", ["torch_dist", "legacy"])
def test_a_flipped_byte_in_a_tensor(copy: Copy, name: str) -> None:
    src = copy(name)
    path = next((src / "release").glob("__1_0.distcp" if name == "torch_dist" else "mp_rank_00_001/*.pt"))
    flip(path, path.stat().st_size // 2)  # only a tensor is that large
    problem = refusal(*convert(src))
    assert problem["message"] == "the bytes of a tensor changed since they were written"
    assert problem["file"] == str(path) and "CRC32" in problem["rule"]
    assert problem["tensor"].startswith("model.layers.")
    assert reshard("verify", src, src).code == 2


def test_a_flipped_byte_in_a_header(copy: Copy) -> None:
    """Any byte of a safetensors header may flip: it is refused, or the name of a tensor changes."""
    src = copy("qwen3")
    whole = (src / "model.safetensors").read_bytes()
    for at in (0, 1, 7, 8, 9, 20, 60, 100, 150, 201):
        (src / "model.safetensors").write_bytes(whole)
        flip(src / "model.safetensors", at)
        problems = refused(*convert(src, *MEGATRON))
        assert all("src" in problem["file"] for problem in problems)


def test_tensors_of_another_size_than_the_header_says(copy: Copy) -> None:
    src = copy("qwen3")
    path = src / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"shape":[128,64]', b'"shape":[128,60]', 1))
    problem = refusal(*convert(src, *MEGATRON))
    assert problem["message"] == "an entry of a safetensors header is inconsistent"
    assert problem["expected"] == "30720 bytes for float32 [128, 60]" and problem["found"] == "32768 bytes"


def test_bytes_behind_the_last_tensor(copy: Copy) -> None:
    src = copy("qwen3")
    with (src / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert refusal(*convert(src, *MEGATRON))["message"] == "the file is longer than its tensors"


def test_a_git_lfs_pointer(copy: Copy) -> None:
    src = copy("qwen3")
    (src / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\n"
        "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
    )
    problem = refusal(*convert(src, *MEGATRON))
    assert problem["found"] == "a Git LFS pointer" and "git lfs pull" in problem["remedy"]


# ----------------------------------------------------------------------------- ranks that do not agree


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("legacy", "mp_rank_01_000", "mp_rank_00_000"),
        ("legacy", "mp_rank_00_001", "mp_rank_00_000"),
        ("legacy moe", "mp_rank_00_001", "mp_rank_00_000"),
    ],
)
def test_the_same_legacy_rank_twice(copy: Copy, name: str, wrong: str, right: str) -> None:
    src = copy(name)
    replace_folder(src / "release" / wrong, src / "release" / right)
    problem = refusal(*convert(src))
    assert problem["message"] == "the file of one rank is a copy of another rank's"
    assert wrong in problem["file"] and right in problem["found"]


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("legacy", "mp_rank_00_000", "mp_rank_01_000"),
        ("legacy", "mp_rank_01_000", "mp_rank_01_001"),
        ("legacy moe", "mp_rank_00_000", "mp_rank_00_001"),
    ],
)
def test_two_legacy_ranks_exchanged(copy: Copy, name: str, one: str, other: str) -> None:
    """In a checkpoint that reshard wrote, which records its ranks like a run of Megatron-LM."""
    src = copy(name)
    first, second = (src / "release" / rank for rank in (one, other))
    first.rename(src / "spare")
    second.rename(first)
    (src / "spare").rename(second)
    problems = refused(*convert(src))
    assert {problem["message"] for problem in problems} == {"a file belongs to another rank"}
    assert [problem["file"] for problem in problems] == [
        str(path / "model_optim_rng.pt") for path in sorted((first, second))
    ]
    assert reshard("verify", src, src).code == 2


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("torch_dist", 1, 0),  # other chunks at other places
        ("torch_dist", 0, 1),
        ("torch_dist", 3, 1),  # the same shapes at the same places: embedding and head are alike
        ("torch_dist moe", 1, 0),
    ],
)
def test_the_same_file_of_a_rank_twice(copy: Copy, name: str, wrong: int, right: int) -> None:
    src = copy(name)
    shutil.copy(find(src, f"__{right}_0.distcp"), find(src, f"__{wrong}_0.distcp"))
    problem = refusal(*convert(src))
    assert problem["message"] == "the file of one rank is a copy of another rank's"
    named = problem["file"] + problem["found"]
    assert f"__{right}_0.distcp" in named and f"__{wrong}_0.distcp" in named


def test_ranks_hold_different_values_of_a_replicated_tensor(copy: Copy) -> None:
    src = copy("legacy")
    path = src / "release" / "mp_rank_01_001" / "model_optim_rng.pt"
    edit_rank(path, lambda model: model["decoder.final_layernorm.weight"].add_(1))
    problem = refusal(*convert(src))
    assert problem["message"] == "a tensor is stored twice, with different values"
    assert problem["tensor"] == "decoder.final_layernorm.weight" and problem["file"] == str(path)
    assert "mp_rank_00_001" in problem["expected"] and "equal on all ranks" in problem["rule"]


def test_one_rank_lacks_a_tensor(copy: Copy) -> None:
    src = copy("legacy")
    path = src / "release" / "mp_rank_01_000" / "model_optim_rng.pt"
    edit_rank(path, lambda model: model.pop("decoder.layers.0.mlp.linear_fc2.weight"))
    problem = refusal(*convert(src))
    assert problem["message"] == "a shard of a tensor is missing"
    assert problem["tensor"] == "decoder.layers.0.mlp.linear_fc2.weight"
    assert problem["found"] == "nothing in the files of tensor-parallel rank 1"


def test_the_rank_of_another_run(copy: Copy) -> None:
    src = copy("legacy")
    path = src / "release" / "mp_rank_01_000" / "model_optim_rng.pt"
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    edit_rank(path, lambda model: model.update({name: model[name][:, :24].clone()}))
    problem = refusal(*convert(src))
    assert problem["message"] == "the shards of a tensor are not equal in size"
    assert (problem["tensor"], problem["file"], problem["found"]) == (name, str(path), "[64, 24]")


# --------------------------------------------------------------------------- pickles with code in them


class Trap:
    """An object whose pickle runs code."""

    def __init__(self, function: Callable[..., Any], argument: str) -> None:
        self.call = function, (argument,)

    def __reduce__(self) -> Any:
        return self.call


def replace_pickle(path: Path, content: bytes) -> None:
    """Replace the pickle of a torch file, with a valid checksum; a bare pickle is replaced entirely."""
    if not zipfile.is_zipfile(path):
        path.write_bytes(content)
        return
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, member in members.items():
            archive.writestr(name, content if name.endswith("/data.pkl") else member)


@pytest.mark.parametrize("call", ["os.system", "builtins.eval"])
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("legacy", "mp_rank_00_000/model_optim_rng.pt"),
        ("torch_dist", "common.pt"),
        ("torch_dist", ".metadata"),
        ("qwen3", "pytorch_model.bin"),
    ],
)
def test_code_in_a_pickle_is_not_run(copy: Copy, name: str, file: str, call: str, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    trap = (
        Trap(os.system, f"touch {sprung}")
        if call == "os.system"
        else Trap(eval, f"open({str(sprung)!r}, 'w')")
    )
    content = pickle.dumps({"model": {"weight": trap}}, protocol=2)
    pickle.loads(content)
    assert sprung.exists(), "the trap is live"
    sprung.unlink()

    src = copy(name)
    if name == "qwen3":
        (src / "model.safetensors").unlink()
        torch.save({}, src / file)
        path = src / file
    else:
        path = next((src / "release").glob(file))
    replace_pickle(path, content)
    problem = refusal(*convert(src, *MEGATRON))
    assert "nothing was executed" in problem["message"] and problem["file"] == str(path)
    assert problem["found"] == ("posix.system" if call == "os.system" else "builtins.eval")
    assert reshard("inspect", src).code == 2
    assert not sprung.exists()
