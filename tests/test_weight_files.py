"""Of the files in a Hugging Face folder, those that transformers loads are read; its own saves leave others there."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import reshard
from reshard.base.errors import ReshardError
from tests.judges import tensors_of

INDEX = "model.safetensors.index.json"
Models = Callable[..., Path]
Weights = dict[str, torch.Tensor]


@pytest.fixture
def folder(hf_model: Models, tmp_path: Path) -> Path:
    """A folder with config and tokenizer, without weights."""
    ignored = shutil.ignore_patterns("*.safetensors", "*.index.json")
    return Path(shutil.copytree(hf_model("qwen2"), tmp_path / "saved", ignore=ignored))


@pytest.fixture
def save(hf_model: Models, folder: Path) -> Callable[..., Weights]:
    """Save another model into the folder, as users do, and return its weights."""

    def saved(times: float, **options: Any) -> Weights:
        model = AutoModelForCausalLM.from_pretrained(hf_model("qwen2"))
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(times)
        model.save_pretrained(folder, **options)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    return saved


def loaded_by_transformers(folder: Path) -> Weights:
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


def converted(source: Path, out: Path) -> Weights:
    reshard.convert(source, out, to="huggingface", no_tokenizer=True)
    return tensors_of(out)


def assert_same(ours: Weights, theirs: Weights) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_index_of_an_earlier_save_is_not_believed(
    folder: Path, save: Callable[..., Weights], tmp_path: Path
) -> None:
    """transformers removes the shards of the earlier save and leaves their index."""
    save(2, max_shard_size="100KB")
    expected = save(3)
    assert {path.name for path in folder.glob("model*")} == {INDEX, "model.safetensors"}
    assert_same(converted(folder, tmp_path / "out"), expected)
    assert_same(loaded_by_transformers(folder), expected)
    (note,) = reshard.open(folder).checkpoint.notes
    assert "left from an earlier save" in note


def test_two_models_in_a_folder_are_both_named(
    folder: Path, save: Callable[..., Weights], tmp_path: Path
) -> None:
    """transformers leaves the single file of the earlier save beside shards, and loads it."""
    single = save(2)
    sharded = save(3, max_shard_size="100KB")
    assert_same(loaded_by_transformers(folder), single)
    with pytest.raises(ReshardError) as raised:
        reshard.open(folder)
    (problem,) = raised.value.problems
    assert problem.code == "two-models-in-folder"
    first, second = re.findall(r"\S+\.(?:safetensors|json)\b(?=\s|$)", problem.remedy or "")
    assert_same(converted(Path(first), tmp_path / "first"), single)
    assert_same(converted(Path(second), tmp_path / "second"), sharded)


def test_one_file_that_the_index_names_belongs_to_it(
    folder: Path, save: Callable[..., Weights], tmp_path: Path
) -> None:
    expected = save(2)
    index = {"metadata": {}, "weight_map": dict.fromkeys(expected, "model.safetensors")}
    (folder / INDEX).write_text(json.dumps(index))
    assert_same(converted(folder, tmp_path / "out"), expected)
    assert not reshard.open(folder).checkpoint.notes


def test_the_index_of_other_files_is_named(
    folder: Path, save: Callable[..., Weights], tmp_path: Path
) -> None:
    expected = save(2, max_shard_size="100KB")
    count = len(list(folder.glob("model-*")))
    index = folder / INDEX
    index.write_text(index.read_text().replace(f"-of-{count:05d}", f"-of-{2 * count:05d}"))
    with pytest.raises(ReshardError) as raised:
        reshard.open(folder)
    (problem,) = raised.value.problems
    assert problem.code == "index-of-other-files" and f"-of-{count:05d}" in str(problem.found)
    index.unlink()  # as its remedy says
    assert_same(converted(folder, tmp_path / "out"), expected)


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("indexed", [False, True], ids=["bin", "indexed bins"])
def test_old_files_of_torch_are_not_read(
    shards: bool, indexed: bool, folder: Path, save: Callable[..., Weights], tmp_path: Path
) -> None:
    expected = save(2, max_shard_size="100KB" if shards else "1GB")
    old = {name: tensor * 2 for name, tensor in expected.items()}
    name = "pytorch_model-00001-of-00001.bin" if indexed else "pytorch_model.bin"
    torch.save(old, folder / name)
    if indexed:
        index = {"metadata": {}, "weight_map": dict.fromkeys(old, name)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert_same(converted(folder, tmp_path / "out"), expected)
    assert_same(loaded_by_transformers(folder), expected)
    assert [note for note in reshard.open(folder).checkpoint.notes if f"not read: {name}" in note]
