"""Checkpoints of Composer and LLM Foundry are read, one file or a folder, and other files whose names have a prefix."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.base.errors import ReshardError
from tests.environments import python
from tests.judges import assert_same_tensors, tensors_of
from tests.test_dcp_format import save

SAVED = Path(__file__).parent / "data" / "composer"


def check_composer(folder: Path, out: Path) -> None:
    """The model is the one that transformers saved after training, and so is its config."""
    reshard.convert(folder / "ep0-ba2-rank0.pt", out / "file", no_tokenizer=True)
    assert_same_tensors(tensors_of(out / "file"), tensors_of(folder / "trained"))
    found, wanted = (
        json.loads((each / "config.json").read_text()) for each in (out / "file", folder / "trained")
    )
    assert {key: found[key] for key in wanted if key != "transformers_version"} == {
        key: wanted[key] for key in wanted if key != "transformers_version"
    }
    save({"state": content_of(folder)["state"]}, out / "ep0-ba2")  # as Composer saves it of sharded models
    reshard.convert(out / "ep0-ba2", out / "folder", base=folder / "trained", no_tokenizer=True)
    assert_same_tensors(tensors_of(out / "folder"), tensors_of(folder / "trained"))


def test_both_forms_are_the_model_that_transformers_saved(tmp_path: Path) -> None:
    check_composer(SAVED, tmp_path)


@pytest.mark.slow
def test_what_composer_writes_now_is_read(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    tokenizer = hf_model("llama") / "tokenizer.json"
    code = [python("composer"), "-m", "tests.genuine.make_composer", tokenizer, tmp_path / "run"]
    subprocess.run(code, check=True, cwd=Path(__file__).parents[1])
    check_composer(tmp_path / "run", tmp_path)


def content_of(folder: Path) -> dict[str, Any]:
    """The content of the file."""
    content: dict[str, Any] = torch.load(folder / "ep0-ba2-rank0.pt", weights_only=False)
    return content


def test_other_tensors_of_the_run_are_not_taken_for_the_weights(tmp_path: Path) -> None:
    """Algorithms such as an average of the weights have tensors under the same names."""
    content = content_of(SAVED)
    average = {name: tensor + 1 for name, tensor in content["state"]["model"].items()}
    content["state"]["algorithms"] = {"EMA": {"ema_model": {"named_parameters_dict": average}}}
    torch.save(content, tmp_path / "ep0-ba2-rank0.pt")
    reshard.convert(tmp_path / "ep0-ba2-rank0.pt", tmp_path / "hf", no_tokenizer=True)
    assert_same_tensors(tensors_of(tmp_path / "hf"), tensors_of(SAVED / "trained"))


@pytest.mark.core("None", "config3")
@pytest.mark.parametrize(
    "config", [None, "llama", {"model_type": 3}, {"model_type": "llama", "made_by": {1, 2}}]
)
def test_without_a_usable_config_the_base_is_asked_for(config: object, tmp_path: Path) -> None:
    content = content_of(SAVED)
    content["state"]["integrations"] = {"huggingface": {"model": {"config": {"content": config}}}}
    torch.save(content, tmp_path / "ep0-ba2-rank0.pt")
    with pytest.raises(ReshardError, match="--base"):
        reshard.convert(tmp_path / "ep0-ba2-rank0.pt", tmp_path / "hf", no_tokenizer=True)
    reshard.convert(tmp_path / "ep0-ba2-rank0.pt", tmp_path / "hf", base=SAVED / "trained", no_tokenizer=True)
    assert_same_tensors(tensors_of(tmp_path / "hf"), tensors_of(SAVED / "trained"))


def test_the_prefix_that_a_module_of_lightning_adds_is_removed(tmp_path: Path) -> None:
    weights = tensors_of(SAVED / "trained")
    torch.save({"state_dict": {f"model.{n}": t for n, t in weights.items()}}, tmp_path / "pytorch_model.bin")
    reshard.convert(tmp_path, tmp_path / "hf", base=SAVED / "trained", no_tokenizer=True)
    assert_same_tensors(tensors_of(tmp_path / "hf"), weights)
