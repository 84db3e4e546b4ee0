"""Each TRL method under reshard's plans: the losses are TRL's own, its checkpoints resume, its folder loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reshard.diagnosis.environment import Environment
from reshard.training import trl
from reshard.training.final.finish import finish
from reshard.training.methods import METHODS
from reshard.training.preflight import preflight
from reshard.training.run import Run
from reshard.training.trl.methods import WAYS
from tests.train.conftest import chats, preferences, rated, write_lines
from tests.train.trl_plans import ENVIRONMENTS, FOUR_DIGITS, PLANS, run_of
from tests.train.trl_runs import STEPS, Ran, train

NOWHERE = Environment({}, [], None, {})
NEW = ("kto", "orpo", "cpo", "reward", "gkd")
"""Methods that are not tested with the plans in general."""
EACH = ["kto", "reward", *(pytest.param(name, marks=pytest.mark.slow) for name in ("orpo", "cpo", "gkd"))]
OPTIONS: dict[str, dict[str, Any]] = {"gkd": {"lmbda": 0.5, "max_new_tokens": 8}}


def asked(method: str, plan: str, model: Path, data: Path, output: Path, **options: Any) -> Run:
    given = {**OPTIONS.get(method, {}), **options}
    lora = given.pop("lora", False)
    if WAYS[method].teacher:
        given.setdefault(WAYS[method].teacher, str(model))
    return run_of(plan, method, model, data, output, lora, 1, given)


@pytest.fixture(scope="session")
def ran(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], data: dict[str, Path]
) -> Callable[..., Ran]:
    """Train once for each method and plan."""
    done: dict[str, Ran] = {}

    def get(method: str, plan: str = "one", **options: Any) -> Ran:
        key = f"{method}-{plan}-{sorted(options.items())}"
        if key not in done:
            if method == "gkd":
                options.setdefault(
                    str(WAYS[method].teacher), str(tiny("qwen3", intermediate_size=96, seed=1))
                )
            run = asked(method, plan, tiny("qwen3"), data[method], tmp_path_factory.mktemp(method), **options)
            done[key] = train(run, PLANS[plan], environment=ENVIRONMENTS.get(plan))
            assert not done[key].failed, done[key].log
        return done[key]

    return get


def plain_losses(run: Run, folder: Path) -> list[float]:
    """The results of TRL's own trainer, without any of reshard's code."""
    from datasets import load_dataset
    from transformers import AutoTokenizer, set_seed

    way = WAYS[run.method]
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
    model = way.model_class().from_pretrained(run.model, dtype="float32", **way.model_arguments)
    more = {"teacher_model": run.options[way.teacher]} if way.teacher else {}
    trainer = way.trainer_class()(
        model=model,
        args=settings,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(run.model),
        **more,
    )
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("method", EACH)
def test_losses_are_those_of_plain_trl_to_the_bit(
    method: str, ran: Callable[..., Ran], tmp_path: Path
) -> None:
    one = ran(method)
    assert len(one.losses) == STEPS["max_steps"]
    assert one.losses == plain_losses(one.run, tmp_path)


@pytest.mark.parametrize("method", EACH)
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
def test_every_plan_of_a_method_has_the_losses_of_one_process(
    method: str, plan: str, ran: Callable[..., Ran], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    if plan not in WAYS[method].plans:
        found = preflight(replace(ran(method).run, output=tmp_path, parallel=plan), environment=NOWHERE)
        assert "trl-method-plan-unsupported" in {problem.code for problem in found.problems}
        return
    of_rank = (
        {"loss_type": "apo_zero_unpaired"} if method == "kto" else {}
    )  # KL is estimated in a rank's batch
    of_rank |= {"lmbda": 0.0} if method == "gkd" else {}  # each rank draws answers of its own
    spread, one = ran(method, plan, **of_rank), ran(method, **of_rank)
    assert spread.losses == pytest.approx(one.losses, abs=FOUR_DIGITS)
    assert trl.ENGINE.check(spread.run, spread.trained, spread.trained.checkpoint) == []


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ddp", "fsdp2"])
def test_ranks_that_draw_answers_for_distillation_do_so_together(plan: str, ran: Callable[..., Ran]) -> None:
    spread = ran("gkd", plan, lmbda=0.5)
    assert len(spread.losses) == STEPS["max_steps"] and spread.losses[-1] < spread.losses[0]


@pytest.mark.parametrize("method", ["kto", "reward"])
def test_the_final_folder_loads(method: str, ran: Callable[..., Ran], tmp_path: Path) -> None:
    one = ran(method)
    shutil.copytree(one.run.output, tmp_path / "out")
    trained = json.loads((tmp_path / "out/trained.json").read_text())
    content = {**trained, "checkpoint": str(tmp_path / "out" / Path(trained["checkpoint"]).name)}
    (tmp_path / "out/trained.json").write_text(json.dumps(content))
    found = finish(replace(one.run, output=tmp_path / "out"))
    assert found.whole, found.problems
    model, told = WAYS[method].model_class().from_pretrained(tmp_path / "out/final", output_loading_info=True)
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
    found = preflight(run, environment=NOWHERE)
    assert found.problems == [], found.problems
    assert found.room is not None and found.room.fits
    parts = found.room.needed.parts
    assert ("reference model" in parts) is (method == "kto")
    assert ("teacher" in parts) is (method == "gkd")


@pytest.mark.parametrize(
    ("method", "rows", "cure"),
    [
        ("kto", preferences, "write each pair as two records"),
        ("kto", chats, "rename the columns"),
        ("reward", rated, "give two answers to each prompt"),
        ("orpo", chats, "give two answers to each prompt"),
        ("gkd", preferences, "rename the columns"),
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
    found = preflight(asked(method, "one", tiny("qwen3"), file, tmp_path / "out"), environment=NOWHERE)
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
        ("gkd", {"packing": True}, "option-not-read-by-trainer"),
        ("gkd", {"teacher_model_name_or_path": "nowhere"}, "teacher-not-hugging-face"),
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


def test_a_method_is_one_entry_here_and_one_there() -> None:
    assert set(WAYS) == set(METHODS)
    for way in WAYS.values():
        assert issubclass(way.config_class(), object) and way.trainer_class().__name__ == f"{way.name}Trainer"
