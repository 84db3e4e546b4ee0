"""Each TRL method under reshard's plans: the losses are TRL's own, its checkpoints resume, its folder loads."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import reshard as api
from reshard.base.errors import ReshardError
from reshard.checks.environment import Environment
from reshard.training import trl
from reshard.training.finish import finish
from reshard.training.methods import EXPERIMENTAL_METHODS, TRAINING_METHODS, generates, is_rewarded
from reshard.training.preflight import preflight
from reshard.training.run import Run
from reshard.training.trl.trl_methods import TRL_METHODS
from tests.commandline import reshard
from tests.train.conftest import chats, preferences, rated, write_lines
from tests.train.rewards import variety
from tests.train.trl_plans import ENVIRONMENTS, PLANS, run_of, same_as
from tests.train.trl_runs import STEPS, Ran, train

NOWHERE = Environment({}, [], None, {})
NEW = ("kto", "reward", "distillation", "rloo")
"""Methods that are not tested with the plans in general."""


def asked(method: str, plan: str, model: Path, data: Path, output: Path, **options: Any) -> Run:
    lora = options.pop("lora", False)
    if TRL_METHODS[method].teacher:
        options.setdefault(str(TRL_METHODS[method].teacher), str(model))
    return run_of(plan, method, model, data, output, lora, 1, options)


def rewarded(run: Run) -> Run:
    """The run with its reward as it is called from here; ranks are started in its folder."""
    return replace(run, reward=tuple(f"tests.train.{each}" for each in run.reward))


@pytest.fixture(scope="session")
def ran(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], data: dict[str, Path]
) -> Callable[..., Ran]:
    """Train once for each method and plan."""
    done: dict[str, Ran] = {}

    def get(method: str, plan: str = "one", **options: Any) -> Ran:
        key = f"{method}-{plan}-{sorted(options.items())}"
        if key not in done:
            if TRL_METHODS[method].teacher:
                options.setdefault(
                    str(TRL_METHODS[method].teacher), str(tiny("qwen3", intermediate_size=96, seed=1))
                )
            run = asked(method, plan, tiny("qwen3"), data[method], tmp_path_factory.mktemp(method), **options)
            done[key] = train(run, PLANS[plan], environment=ENVIRONMENTS.get(plan))
            assert not done[key].failed, done[key].log
        return done[key]

    return get


def plain_numbers(run: Run, folder: Path) -> list[tuple[float, float]]:
    """Losses and gradient norms of TRL's own trainer, without any of reshard's code."""
    from datasets import load_dataset
    from transformers import AutoTokenizer, set_seed

    way = TRL_METHODS[run.method]
    rows = load_dataset("json", data_files=str(run.data), split="train", cache_dir=str(folder / "cache"))
    given = {
        name: value for name, value in run.options.items() if name not in ("eval_steps", "eval_on_start")
    }
    settings = way.config_class()(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        **{name: value for name, value in given.items() if name != "save_steps"},
    )
    set_seed(settings.seed)
    model = way.model_class(run.model).from_pretrained(run.model, dtype="float32", **way.model_arguments)
    more: dict[str, Any] = {"teacher_model": run.options[way.teacher]} if way.teacher else {}
    more |= {"reward_funcs": [variety]} if is_rewarded(run.method) else {}
    trainer = way.trainer_class()(
        model=model,
        args=settings,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(run.model),
        **more,
    )
    trainer.train()
    return [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("method", NEW)
@pytest.mark.core("rloo")
def test_losses_are_those_of_plain_trl_to_the_bit(
    method: str, ran: Callable[..., Ran], tmp_path: Path
) -> None:
    one = ran(method)
    assert len(one.losses) == STEPS["max_steps"]
    assert [(row["loss"], row["grad_norm"]) for row in one.rows] == plain_numbers(one.run, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("method", NEW)
def test_a_run_goes_on_as_if_it_had_not_been_killed(
    method: str, ran: Callable[..., Ran], tmp_path: Path
) -> None:
    one = ran(method)
    shutil.copytree(one.run.output / "checkpoint-2", tmp_path / "checkpoint-2")
    again = train(replace(one.run, output=tmp_path, resume=True), 1)
    assert not again.failed, again.log
    assert again.losses == one.losses[2:]
    assert again.trained.digests == one.trained.digests


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ddp", "fsdp2", "tp", "zero2", "zero3"])
@pytest.mark.parametrize("method", NEW)
def test_every_plan_of_a_method_has_the_same_losses(
    method: str, plan: str, ran: Callable[..., Ran], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    if plan not in TRL_METHODS[method].plans:
        found = preflight(replace(ran(method).run, output=tmp_path, parallel=plan), environment=NOWHERE)
        assert "trl-method-plan-unsupported" in {problem.code for problem in found.problems}
        return
    of_rank: dict[str, Any] = {
        "kto": {"loss_type": "apo_zero_unpaired"},  # KL is estimated in a rank's batch
        "distillation": {"generation_kwargs": {"do_sample": False}},  # each rank draws answers of its own
    }.get(method, {})
    like = "ddp" if method == "rloo" and plan != "tp" else "one"
    spread, alike = ran(method, plan, **of_rank), ran(method, like, **of_rank)
    same_as(spread, alike)
    assert trl.ENGINE.check(spread.run, spread.trained, spread.trained.checkpoint) == []


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ddp", "fsdp2"])
def test_ranks_that_draw_answers_for_distillation_learn(plan: str, ran: Callable[..., Ran]) -> None:
    spread = ran("distillation", plan)
    assert len(spread.losses) == STEPS["max_steps"] and spread.losses[-1] < spread.losses[0]
    assert all(row["tokens"] > 0 for row in spread.rows)


@pytest.mark.core("reward", "rloo")
@pytest.mark.parametrize("method", NEW)
def test_the_final_folder_loads(method: str, ran: Callable[..., Ran], tmp_path: Path) -> None:
    one = ran(method)
    shutil.copytree(one.run.output, tmp_path / "out")
    trained = json.loads((tmp_path / "out/trained.json").read_text())
    content = {**trained, "checkpoint": str(tmp_path / "out" / Path(trained["checkpoint"]).name)}
    (tmp_path / "out/trained.json").write_text(json.dumps(content))
    found = finish(replace(one.run, output=tmp_path / "out"))
    assert found.whole, found.problems
    model, told = (
        TRL_METHODS[method]
        .model_class(tmp_path / "out/final")
        .from_pretrained(tmp_path / "out/final", output_loading_info=True)
    )
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    if method == "reward":
        assert type(model).__name__ == "Qwen3ForSequenceClassification"
        assert (model.config.num_labels, model.score.weight.shape[0]) == (1, 1)
        assert model.config.pad_token_id is not None
        assert bool(model.score.weight.any())


@pytest.mark.parametrize("method", NEW)
def test_the_dry_run_takes_the_data_of_a_method(
    method: str, tiny: Callable[..., Path], data: dict[str, Path], tmp_path: Path
) -> None:
    run = asked(method, "one", tiny("qwen3"), data[method], tmp_path / "out")
    found = preflight(rewarded(run), environment=NOWHERE)
    assert found.problems == [], found.problems
    assert found.room is not None and found.room.fits
    parts = found.room.needed.parts
    assert ("reference model" in parts) is (method in ("kto", "rloo"))
    assert ("teacher" in parts) is (method == "distillation")
    assert ("keys and values" in parts) is generates(method)


@pytest.mark.parametrize(
    ("method", "rows", "cure"),
    [
        ("kto", preferences, "write each pair as two records"),
        ("kto", chats, "rename the columns"),
        ("reward", rated, "give two answers to each prompt"),
        ("distillation", chats, "keep the turns before the answer as `prompt`"),
        ("rloo", chats, "what the reward needs goes into columns of its own"),
    ],
)
def test_data_of_another_method_are_refused(
    method: str,
    rows: Callable[[], list[dict[str, object]]],
    cure: str,
    tiny: Callable[..., Path],
    tmp_path: Path,
) -> None:
    file = write_lines(tmp_path / "rows.jsonl", rows())
    run = rewarded(asked(method, "one", tiny("qwen3"), file, tmp_path / "out"))
    found = preflight(run, environment=NOWHERE)
    assert [problem.code for problem in found.problems] == ["columns-missing"]
    assert cure in str(found.problems[0].remedy)


def test_a_label_is_a_truth_value(tiny: Callable[..., Path], tmp_path: Path) -> None:
    rows = [{**row, "label": int(bool(row["label"]))} for row in rated()]
    file = write_lines(tmp_path / "rows.jsonl", rows)
    found = preflight(asked("kto", "one", tiny("qwen3"), file, tmp_path / "out"), environment=NOWHERE)
    assert {problem.expected for problem in found.problems} == {"true for a good answer, false for a bad one"}


@pytest.mark.parametrize(
    ("method", "given", "code"),
    [
        ("reward", {"lora": True}, "reward-model-adapters"),
        ("distillation", {"teacher_model_name_or_path": "nowhere"}, "model-not-hugging-face"),
        (
            "distillation",
            {"teacher_model_init_kwargs": {"device_map": "auto"}},
            "model-init-kwarg-not-passed-on",
        ),
    ],
)
def test_what_a_method_cannot_do_is_refused_before_the_launch(
    method: str,
    given: dict[str, Any],
    code: str,
    tiny: Callable[..., Path],
    data: dict[str, Path],
    tmp_path: Path,
) -> None:
    found = preflight(
        asked(method, "one", tiny("qwen3"), data[method], tmp_path / "out", **given), environment=NOWHERE
    )
    assert [problem.code for problem in found.problems] == [code]


@pytest.mark.parametrize("name", EXPERIMENTAL_METHODS)
def test_a_method_that_trl_calls_experimental_names_its_class(name: str) -> None:
    found = reshard("train", name, "--model", "m", "--data", "d", "-o", "o")
    assert found.code == 2 and "reshard guard -- accelerate launch script.py" in found.err, found
    with pytest.raises(ReshardError) as raised:
        api.train(name, model="m", data="d", output="o")
    (problem,) = raised.value.problems
    assert problem.code == "method-experimental"
    _, module, name = re.split(r"use (trl\.experimental\.\w+)\.(\w+)", str(problem.remedy))[:3]
    assert getattr(import_module(module), name).__name__ == name


def test_a_method_is_one_entry_here_and_one_there() -> None:
    assert set(TRL_METHODS) == set(TRAINING_METHODS)
    for way in TRL_METHODS.values():
        assert issubclass(way.config_class(), object) and way.trainer_class().__name__ == f"{way.name}Trainer"
