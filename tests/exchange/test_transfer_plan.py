"""What the ranks of a trainer send to those of an engine, as vLLM's loaders were recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import reshard
from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.exchange.engine_recording import read_recordings
from reshard.exchange.megatron_trainer import Trainer, described_trainer
from reshard.exchange.transfer_plan import plan_transfer
from tests.exchange.memory import loaded, received

RECORDINGS = Path(__file__).parents[1] / "data/vllm/recordings"
"""What vLLM 0.32.0 recorded of these models at TP 2: tests/exchange/test_recording.py makes them again."""
SIZES = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYOUTS = {
    "qwen3_moe": [
        {"tp": 2, "pp": 2, "ep": 2, "etp": 1},
        {"tp": 1, "pp": 2, "ep": 4},
        {"tp": 2, "pp": 1, "vpp": 1, "ep": 1, "etp": 2},
        {"tp": 1, "pp": 2, "vpp": 2, "ep": 2},
    ],
    "llama_tied": [{"tp": 1, "pp": 1}, {"tp": 2, "pp": 2}],
}
CASES = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]


@pytest.fixture(scope="module")
def models(hf_model: Callable[..., Path]) -> dict[str, Path]:
    return {name: hf_model(name, **SIZES) for name in LAYOUTS}


def trainer_for(model: Path, layout: dict[str, int], dp: int = 1) -> Trainer:
    return described_trainer(model, Layout(**{"etp": layout["tp"], **layout}, dp=dp), dtype="float32")


def memory_of(trainer: Trainer, saved: Path) -> dict[int, dict[tuple[str, str], Any]]:
    """The tensors of each rank of a trainer, from the rank files that Megatron-Core would load there."""
    (folder,) = (each for each in saved.iterdir() if each.is_dir())
    files = {}
    for each in folder.iterdir():
        state = torch.load(each / "model_optim_rng.pt", weights_only=False)
        args = state["args"]
        parts = [int(part) for part in each.name.split("_")[2:]]
        stage = parts.pop(1) if args.pipeline_model_parallel_size > 1 else 0
        files[f"tp{parts[0]}-pp{stage}-ep{parts[1] if parts[1:] else 0}"] = state
    memory: dict[int, dict[tuple[str, str], Any]] = {}
    for turns in trainer.holders.values():
        for rank, storage in turns:
            chunk, key = trainer.keys[storage]
            tensor = files[storage.path][chunk][key]
            memory.setdefault(rank, {})[chunk, key] = tensor.contiguous().reshape(-1).numpy()
    return memory


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_an_engine_gets_what_its_loaders_would_have_made(
    name: str, layout: dict[str, int], models: dict[str, Path], tmp_path: Path
) -> None:
    recordings = read_recordings(RECORDINGS / name)
    trainer = trainer_for(models[name], layout)
    plan = plan_transfer(trainer, recordings)
    reshard.convert(models[name], tmp_path / "run", to="megatron-legacy", **layout)
    held = memory_of(trainer, tmp_path / "run")
    hub = load_file(next(models[name].glob("*.safetensors")))
    for recording in recordings:
        expected, arrived = loaded(recording, hub), received(recording, plan.transfers, held)
        assert arrived.keys() == expected.keys()
        for parameter, values in expected.items():
            np.testing.assert_array_equal(arrived[parameter], values, err_msg=parameter)
    assert plan.nbytes == plan.lower_bound == sum(each.nbytes for each in recordings)


def test_each_rank_plans_its_own_part_of_the_same_plan(models: dict[str, Path]) -> None:
    layout = {"tp": 1, "pp": 2, "ep": 4}
    recordings = read_recordings(RECORDINGS / "qwen3_moe")
    trainer = trainer_for(models["qwen3_moe"], layout, dp=2)
    whole = plan_transfer(trainer, recordings)
    assert trainer.ranks == 16
    for rank in range(trainer.ranks):
        own = plan_transfer(trainer, recordings, sender=rank)
        assert sorted(own.transfers) == sorted(whole.sends_of(rank))


def test_replicas_take_turns(models: dict[str, Path]) -> None:
    """Every rank of a data-parallel trainer holds all of the model."""
    trainer = trainer_for(models["llama_tied"], {"tp": 1, "pp": 1}, dp=4)
    plan = plan_transfer(trainer, read_recordings(RECORDINGS / "llama_tied"))
    sent = plan.sent()
    assert sent.keys() == {0, 1, 2, 3}
    assert max(sent.values()) < 1.5 * plan.nbytes / 4  # the embedding is a third of this model


def test_what_a_machine_has_does_not_cross_to_it(models: dict[str, Path]) -> None:
    trainer = trainer_for(models["llama_tied"], {"tp": 2, "pp": 1}, dp=2)
    recordings, machines = RECORDINGS / "llama_tied", (["a", "a", "b", "b"], ["b", "c"])
    plan = reshard.transfer_plan(trainer, recordings, nodes=machines)
    others = reshard.transfer_plan(trainer, recordings)
    assert plan.nbytes == others.nbytes == plan.lower_bound
    assert plan.links().keys() == {("a", "c"), ("b", "c")} and not others.links()
    assert {each.sender for each in plan.transfers if each.receiver == 0} == {2, 3}
    assert "2 links between machines" in plan.summary()
    with pytest.raises(ReshardError, match="4 and 2 names of machines"):
        reshard.transfer_plan(trainer, recordings, nodes=(["a"], ["b", "c"]))


def test_a_recording_survives_json(tmp_path: Path) -> None:
    for recording in read_recordings(RECORDINGS / "qwen3_moe"):
        recording.save(tmp_path)
    assert read_recordings(tmp_path) == read_recordings(RECORDINGS / "qwen3_moe")
    files = [each.read_bytes() for each in sorted((RECORDINGS / "qwen3_moe").iterdir())]
    assert [each.read_bytes() for each in sorted(tmp_path.iterdir())] == files


def test_a_plan_is_json(models: dict[str, Path]) -> None:
    trainer = trainer_for(models["llama_tied"], {"tp": 2, "pp": 2})
    plan = plan_transfer(trainer, read_recordings(RECORDINGS / "llama_tied"))
    told = json.loads(json.dumps(plan.as_dict()))
    assert told["bytes"] == told["lower_bound"] == plan.nbytes
    assert len(told["transfers"]) == len(plan.transfers)
    assert told["transfers"][0]["tensor"][0] == "model"
    assert "4 trainer ranks to 2 engine ranks" in plan.summary()


def spoiled(change: Callable[[dict[str, Any]], object], folder: Path) -> Path:
    """A copy of a recording with a change to that of rank 0."""
    for path in (RECORDINGS / "llama_tied").iterdir():
        content = json.loads(path.read_text())
        if content["rank"] == 0:
            change(content)
        (folder / path.name).write_text(json.dumps(content))
    return folder


def repeat_a_piece(content: dict[str, Any]) -> None:
    pieces = content["parameters"]["model.norm.weight"]["pieces"]
    pieces.append(pieces[0])


def rename_a_source(content: dict[str, Any]) -> None:
    content["parameters"]["model.norm.weight"]["pieces"][0][0] = "model.norm.bias"


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another version": (lambda content: content.update(version=2), "version 2"),
    "no number": (lambda content: content.update(rank="first"), "rank-0.json"),
    "another rank": (lambda content: content.update(rank=5), "recording of a rank is missing"),
    "no parameters": (lambda content: content.pop("parameters"), "parameters"),
    "two sources": (repeat_a_piece, "two sources"),
    "a name that no shape has": (rename_a_source, "does not have all elements"),
    "another model": (lambda content: content["shapes"].update({"lm_head.bias": [3]}), "lm_head.bias"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_planned_is_refused(case: str, models: dict[str, Path], tmp_path: Path) -> None:
    change, told = WRONG[case]
    trainer = trainer_for(models["llama_tied"], {"tp": 1, "pp": 1})
    with pytest.raises(ReshardError, match=told):
        plan_transfer(trainer, read_recordings(spoiled(change, tmp_path)))


def test_a_rank_that_the_trainer_does_not_have(models: dict[str, Path]) -> None:
    trainer = trainer_for(models["llama_tied"], {"tp": 1, "pp": 1})
    for rank in (-1, 1):
        with pytest.raises(ReshardError, match="no such rank"):
            plan_transfer(trainer, read_recordings(RECORDINGS / "llama_tied"), sender=rank)


def test_no_recordings(tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match=r"rank-0\.json"):
        read_recordings(tmp_path)


def test_an_undeclared_family(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody_has_this"}')
    with pytest.raises(ReshardError, match="not declared"):
        described_trainer(tmp_path, Layout())
