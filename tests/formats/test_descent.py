"""Finding the folder with the weights from the folder that people pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.base.errors import ReshardError
from reshard.folders.find_weights import descend, find_root
from reshard.formats import open_checkpoint


def made(root: Path, *folders: str) -> Path:
    for folder in folders:
        (root / folder).mkdir(parents=True)
    return root


def holds(*names: str):
    return lambda place: place.name in names


@pytest.mark.parametrize(
    ("folders", "weights"),
    [
        (["checkpoint-9", "checkpoint-10"], "checkpoint-10"),
        (
            ["checkpoint-9/pytorch_model_fsdp_0", "checkpoint-9/optimizer_0"],
            "checkpoint-9/pytorch_model_fsdp_0",
        ),
        (["global_step_200/actor", "global_step_90/actor"], "global_step_200/actor"),
        (["checkpoint/step-1000", "checkpoint/step-20"], "checkpoint/step-1000"),
        (["50", "100"], "100"),
        (
            ["v9-20250101-000000/checkpoint-8", "v10-20250102-000000/checkpoint-3"],
            "v10-20250102-000000/checkpoint-3",
        ),
    ],
)
def test_the_latest_step_is_taken(tmp_path: Path, folders: list[str], weights: str) -> None:
    made(tmp_path, *folders)
    assert descend(tmp_path, holds(Path(weights).name)) == (tmp_path / weights, False)


def test_or_the_step_that_is_asked_for(tmp_path: Path) -> None:
    made(tmp_path, "checkpoint-9/pytorch_model_fsdp_0", "checkpoint-10/pytorch_model_fsdp_0")
    found = tmp_path / "checkpoint-9" / "pytorch_model_fsdp_0"
    assert descend(tmp_path, holds("pytorch_model_fsdp_0"), 9) == (found, True)
    assert descend(tmp_path, holds("pytorch_model_fsdp_0"), 8) == (None, False)


def test_a_folder_that_holds_weights_itself_is_not_left(tmp_path: Path) -> None:
    made(tmp_path, "run/checkpoint-9")
    assert descend(tmp_path / "run", holds("run", "checkpoint-9"), 9) == (tmp_path / "run", False)


def test_other_folders_are_not_looked_into(tmp_path: Path) -> None:
    made(tmp_path, "runs/checkpoint-9", "logs")
    with pytest.raises(ReshardError, match="no checkpoint found here"):
        open_checkpoint(tmp_path)


def test_the_config_lies_inside_beside_or_above(tmp_path: Path) -> None:
    made(tmp_path, "step_1/actor/huggingface", "step_2/actor")
    (tmp_path / "step_1" / "actor" / "huggingface" / "config.json").write_text("{}")
    assert find_root(tmp_path / "step_1" / "actor", tmp_path) == tmp_path / "step_1" / "actor" / "huggingface"
    assert find_root(tmp_path / "step_2" / "actor", tmp_path) == tmp_path / "step_2" / "actor"
    (tmp_path / "config.json").write_text("{}")
    assert find_root(tmp_path / "step_2" / "actor", tmp_path) == tmp_path
    assert find_root(tmp_path / "step_2" / "actor", tmp_path / "step_2") == tmp_path / "step_2" / "actor"
