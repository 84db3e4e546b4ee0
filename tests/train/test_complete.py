"""A run continues from a checkpoint that has everything that was saved, and says what another one has lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import reshard as api
from reshard.guard.end.completeness import SAVED_FILE
from reshard.training import trl
from reshard.training.preflight import preflight
from reshard.training.run import Run
from reshard.training.trl import checkpoint_saving
from tests.train.preflights import NOWHERE, messages
from tests.train.trl_plans import PLANS, Trainer
from tests.train.trl_runs import train

WHOLE, SPREAD = ("optimizer.pt",), ("optimizer_0/.metadata", "optimizer_0/__1_0.distcp")
STATES = {"one": WHOLE, "ddp": WHOLE, "fsdp2": SPREAD, "tp": SPREAD, "zero2": ("latest", "zero_to_fp32.py")}
"""Some of the files that each plan needs in order to continue, besides weights and random states."""


@pytest.mark.parametrize("plan", ["one", "ddp", "fsdp2", "tp", pytest.param("zero2", marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_a_checkpoint_of_any_plan_that_has_lost_a_file_is_not_continued_from(
    plan: str, ran: Trainer, tmp_path: Path
) -> None:
    output = Path(shutil.copytree(ran(plan).run.output, tmp_path / "out"))
    last, kept = output / "checkpoint-4", trl.ENGINE.checkpoints
    assert kept.last(output) == last and kept.damaged(output) == {}
    ranks = range(PLANS[plan])
    random = {f"rng_state_{rank}.pth" for rank in ranks} if len(ranks) > 1 else {"rng_state.pth"}
    names = set(json.loads((last / SAVED_FILE).read_text()))
    assert {
        *STATES[plan],
        *random,
        "model.safetensors",
        "trainer_state.json",
        "tokenizer.json",
        "scheduler.pt",
    } <= names
    for name in names:
        (last / name).rename(tmp_path / "lost")
        assert kept.last(output) == output / "checkpoint-2"
        assert kept.damaged(output) == {last: [f"{name} is missing"]}
        (tmp_path / "lost").rename(last / name)
    assert kept.last(output) == last


@pytest.mark.thorough
def test_a_file_that_was_cut_is_named_before_the_run_starts(ran: Trainer, tmp_path: Path) -> None:
    run = replace(ran("one").run, output=tmp_path / "out", resume=True)
    shutil.copytree(ran("one").run.output, run.output)
    for step in (4, 2):
        with (run.output / f"checkpoint-{step}/optimizer.pt").open("r+b") as file:
            size = file.seek(0, 2)
            file.truncate(1000)
        found = preflight(run, environment=NOWHERE)
        told = found.warnings if step == 4 else found.problems
        assert messages(told) == ["the checkpoint is no longer complete"] * (1 if step == 4 else 2)
        assert told[0].found == f"optimizer.pt has 1,000 bytes and not {size:,}"
    state = run.output / "checkpoint-2/trainer_state.json"
    (run.output / "checkpoint-2/optimizer.pt").write_bytes(
        (ran("one").run.output / "checkpoint-2/optimizer.pt").read_bytes()
    )
    state.write_text(state.read_text() + "\n")
    assert preflight(run, environment=NOWHERE).problems == [], "users edit texts"


@pytest.mark.thorough
def test_a_model_saved_alone_is_no_checkpoint_whatever_is_asked(ran: Trainer) -> None:
    run = replace(ran("one", save_only_model=True).run, resume=True)
    for asked in ({}, {"save_only_model": "false"}):
        assert preflight(replace(run, options={**run.options, **asked}), environment=NOWHERE).problems


def damage(file: Path) -> None:
    """Change the last bytes of a file, where zip archives have their directory, and not its size."""
    content = file.read_bytes()
    file.write_bytes(content[:-64] + bytes(64 * [255]))


DAMAGED = [
    ("one", "optimizer.pt", "PytorchStreamReader"),
    ("one", "rng_state.pth", "found: "),
    ("fsdp2", "optimizer_0/.metadata", "metadata read failed"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("plan", "name", "found"), DAMAGED)
def test_a_checkpoint_that_cannot_be_loaded_is_named_with_the_one_before(
    plan: str, name: str, found: str, ran: Trainer, tmp_path: Path
) -> None:
    run = replace(ran(plan).run, output=tmp_path / "out", resume=True)
    run = replace(run, options={**run.options, "max_steps": 6})
    shutil.copytree(ran(plan).run.output, run.output)
    damage(run.output / "checkpoint-4" / name)
    log = (again := train(run, PLANS[plan])).log
    assert (
        again.failed and f"the checkpoint cannot be loaded\n  file: {run.output / 'checkpoint-4'}" in log
    ), log
    assert f"--resume then continues from {run.output / 'checkpoint-2'}" in log and found in log


@pytest.mark.thorough
def test_weights_over_the_limit_of_a_file_are_in_shards_and_as_readable_as_the_folder(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("reshard.formats.options.SHARD_SIZE", "64KiB")
    model, folder = AutoModelForCausalLM.from_pretrained(tiny()), tmp_path / "saved"
    checkpoint_saving.write(Run("sft", tiny(), tmp_path, tmp_path), model, None, folder)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2 and files[-1].name == f"model-{len(files):05}-of-{len(files):05}.safetensors"
    assert {file.stat().st_mode & 0o777 for file in files} == {folder.stat().st_mode & 0o666}
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(tensor.equal(loaded[name]) for name, tensor in model.state_dict().items())
    assert api.verify(tiny(), folder).equal
