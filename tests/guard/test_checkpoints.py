"""The last checkpoint from which a run can continue, in genuine folders of many frameworks, whole and broken."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from reshard.final.saved_checkpoints import saved_in
from tests.work import calls, reading_at_most

DATA = Path(__file__).parents[1] / "data"
GENUINE = {
    "deepspeed/z2": ("global_step2", "deepspeed"),
    "deepspeed/z3_lora": ("global_step2", "deepspeed"),
    "megatron-0.19": ("iter_0000002", "megatron"),
    "megatron_lora/swift-tp2": ("iter_0000003", "megatron"),
    "nanotron/llama-tp2-pp2": ("10", "nanotron"),
    "torchtitan/llama": ("checkpoint/step-1", "dcp"),
    "olmo_core/llama": ("step1", "dcp"),
}


@pytest.mark.parametrize("name", GENUINE)
def test_the_checkpoint_of_every_framework_is_found(name: str) -> None:
    saved = saved_in(DATA / name)
    assert saved.weights
    where, format = GENUINE[name]
    assert (saved.weights.path, saved.weights.format) == (DATA / name / where, format)
    assert not saved.incomplete
    assert saved_in(DATA / name, time.time() + 60) == saved_in(DATA / "train"), "none since then"


def test_weights_without_an_optimizer_are_not_continued_from() -> None:
    saved = saved_in(DATA / "nanotron/llama-tp2-pp2")
    assert saved.resumable is None and saved.weights and saved.weights.lacks == ("the optimizer states",)


def cut(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(opened.seek(0, 2) // 2)


BROKEN: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "DeepSpeed names the step before": (
        "deepspeed/z2",
        lambda folder: (folder / "latest").write_text("global_step1") and None,
        "latest names step 1: this one was not finished",
    ),
    "a rank of DeepSpeed is being written": (
        "deepspeed/z2",
        lambda folder: cut(folder / "global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt is cut off",
    ),
    "Megatron's tracker is written last": (
        "megatron-0.19",
        lambda folder: (folder / "latest_checkpointed_iteration.txt").unlink(),
        "latest_checkpointed_iteration.txt is missing, which is written last",
    ),
    "a file of DCP is cut": (
        "torchtitan/llama",
        lambda folder: cut(folder / "checkpoint/step-1/__1_0.distcp"),
        "__1_0.distcp",
    ),
    "a file of DCP is missing": (
        "megatron-0.19",
        lambda folder: (folder / "iter_0000002/__1_0.distcp").unlink(),
        "__1_0.distcp",
    ),
    "DCP's metadata is written last": (
        "olmo_core/llama",
        lambda folder: (folder / "step1/model_and_optim/.metadata").unlink(),
        "step1",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_checkpoint_that_was_not_finished_is_skipped_and_named(case: str, tmp_path: Path) -> None:
    name, damage, said = BROKEN[case]
    folder = Path(shutil.copytree(DATA / name, tmp_path / "out"))
    damage(folder)
    saved = saved_in(folder)
    assert saved.weights is None
    (told,) = saved.incomplete.values()
    assert said in " ".join(told)


def test_the_one_before_is_continued_from(tmp_path: Path) -> None:
    for step in (1, 2):
        shutil.copytree(DATA / "torchtitan/llama/checkpoint/step-1", tmp_path / f"checkpoint/step-{step}")
        for file in (tmp_path / f"checkpoint/step-{step}").iterdir():
            os.utime(file, (1000 * step, 1000 * step))
        os.utime(tmp_path / f"checkpoint/step-{step}", (1000 * step, 1000 * step))
    last, before = tmp_path / "checkpoint/step-2", tmp_path / "checkpoint/step-1"
    found = saved_in(tmp_path).resumable
    assert found and (found.path, found.step, found.when) == (last, 2, 2000.0)
    (last / ".metadata").unlink()
    saved = saved_in(tmp_path)
    assert saved.resumable and saved.resumable.path == before and list(saved.incomplete) == [last]


def test_a_folder_of_data_is_looked_at_in_few_calls(tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / f"data/{number}").mkdir(parents=True)
    shutil.copytree(DATA / "torchtitan/llama/checkpoint", tmp_path / "checkpoint")
    found = saved_in(tmp_path).resumable
    assert found and found.path.name == "step-1"
    assert calls(lambda: saved_in(tmp_path)) < 150 * 3000


def test_a_step_of_the_trainer_needs_its_state_in_any_format(tmp_path: Path) -> None:
    """As Accelerate saves FSDP: the weights are in torch's distributed checkpoint."""
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        shutil.copytree(DATA / "torchtitan/llama/checkpoint/step-1", tmp_path / f"checkpoint-10/{name}")
    (tmp_path / "checkpoint-10/scheduler.pt").write_bytes(b"\x80\x02.")
    saved = saved_in(tmp_path)
    assert saved.resumable is None and saved.weights and saved.weights.lacks == ("trainer_state.json",)
    (tmp_path / "checkpoint-10/trainer_state.json").write_text('{"global_step": 10}')
    assert (found := saved_in(tmp_path).resumable) and found.step == 10


def test_a_step_may_be_a_single_file(tmp_path: Path) -> None:
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(4)).sum().backward()
    optimizer.step()
    state = {"model": layer.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "step_10.pt")
    torch.save({"model": layer.state_dict()}, tmp_path / "step_20.pt")
    saved = saved_in(tmp_path)
    assert saved.resumable and saved.resumable.path == tmp_path / "step_10.pt"
    assert saved.weights and (saved.weights.step, saved.weights.lacks) == (20, ("the optimizer states",))
    assert saved.last == saved.weights, "complete is what has its weights, as for --final"
    cut(tmp_path / "step_20.pt")
    assert saved_in(tmp_path).incomplete == {tmp_path / "step_20.pt": ["it is cut off"]}


@pytest.mark.parametrize("own", ["opt", "tuple", "two", "module"])
def test_a_step_in_a_file_of_the_scripts_own_is_found(own: str, tmp_path: Path) -> None:
    """The script can read what reshard cannot; the optimizer is known by torch's keys."""
    layer = torch.nn.Linear(4, 4)
    weights, optimizer = layer.state_dict(), torch.optim.AdamW(layer.parameters()).state_dict()
    torch.save(
        {
            "opt": {"model": weights, "opt": optimizer, "step": 9},
            "tuple": (weights, optimizer),
            "two": {"G": weights, "D": weights, "o": optimizer},
            "module": layer,
        }[own],
        tmp_path / "step_9.pt",
    )
    saved = saved_in(tmp_path)
    assert saved.last and (saved.last.path, saved.last.step) == (tmp_path / "step_9.pt", 9)
    assert (saved.resumable is None) == (own == "module")


def test_what_is_no_checkpoint_is_not_taken_for_one_by_its_name(tmp_path: Path) -> None:
    layer = torch.nn.Linear(4, 4)
    torch.save({"model": layer.state_dict()}, tmp_path / "step_8.pt")
    torch.save([torch.ones(3), torch.ones(3)], tmp_path / "epoch_9_predictions.pt")
    torch.save(
        (layer.state_dict(), torch.optim.Adam(layer.parameters()).state_dict()), tmp_path / "step_9.pt"
    )
    for order, name in enumerate(("step_8.pt", "step_9.pt", "epoch_9_predictions.pt")):
        os.utime(tmp_path / name, (1000 + order, 1000 + order))
    saved = saved_in(tmp_path)
    assert saved.last and saved.last.path.name == "step_9.pt"
    (tmp_path / "step_9.pt").unlink()
    assert [each.path.name for each in saved_in(tmp_path).checkpoints] == ["step_8.pt"]


@pytest.mark.core("1", "10")
@pytest.mark.parametrize("first", [1, 2, 5, 9, 10])
def test_a_checkpoint_with_nan_is_not_continued_from(first: int, tmp_path: Path) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
    for step in range(1, 10):
        if step == first:
            layer[1].bias.data[2] = torch.nan
        layer(torch.ones(4)).sum().backward()
        optimizer.step()
        file = tmp_path / f"step_{step}.pt"
        torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, file)
        os.utime(file, (1000 * step, 1000 * step))
    saved = saved_in(tmp_path)
    assert (saved.resumable.step if saved.resumable else None) == (first - 1 or None)
    assert saved.weights and saved.weights.step == 9, "--final does not take an older one instead"
    if first < 10:
        assert saved.weights.lacks[0].startswith("finite weights: ")


def test_a_large_checkpoint_is_read_in_part(tmp_path: Path) -> None:
    """Of a sparse file, which takes no room on the disk."""
    step, size = tmp_path / "checkpoint-10", 1 << 36
    step.mkdir()
    for name in ("optimizer.pt", "trainer_state.json"):
        (step / name).write_text("{}")
    half = {"dtype": "BF16", "shape": [size // 4]}
    entries = {
        "a": {**half, "data_offsets": [0, size // 2]},
        "b": {**half, "data_offsets": [size // 2, size]},
    }
    header = json.dumps(entries).encode()
    with (step / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    with reading_at_most(300 << 20):
        assert saved_in(tmp_path).resumable
    with (step / "model.safetensors").open("r+b") as file:
        file.seek(8 + len(header) + size // 2)
        file.write(b"\xc0\x7f")
    saved = saved_in(tmp_path)
    assert saved.resumable is None and saved.weights
    assert saved.weights.lacks == ("finite weights: b is NaN or infinite",)


def test_the_folder_above_the_steps_is_no_step_though_a_model_was_saved_there(tmp_path: Path) -> None:
    shutil.copytree(DATA / "mlx", tmp_path, dirs_exist_ok=True)
    shutil.copytree(DATA / "mlx", tmp_path / "checkpoint-10")
    for name in ("optimizer.pt", "trainer_state.json"):
        (tmp_path / "checkpoint-10" / name).write_text("{}")
    os.utime(tmp_path / "model.safetensors", (time.time() + 60,) * 2)
    saved = saved_in(tmp_path)
    assert saved.resumable and saved.resumable.path == tmp_path / "checkpoint-10"
    assert saved.weights and saved.weights.path == tmp_path
