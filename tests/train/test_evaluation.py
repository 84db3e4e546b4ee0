"""Evaluation data: requested, checked before the start, and reported during the run.

The losses themselves are tested in `test_trl_runs.py` and `test_megatron_losses.py`.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from reshard.base.errors import Problem, ReshardError
from reshard.checks.environment import Environment
from reshard.guard.end.completeness import RUN_RECORD
from reshard.training import megatron, trl
from reshard.training.engine_registry import engine_named
from reshard.training.launching.run_record import record_of, words_of
from reshard.training.preflight import preflight
from reshard.training.run import Run
from reshard.training.run_request import check, run_of
from reshard.training.show import html_report, trackers
from reshard.training.show.metrics import History, MetricsRow, MetricsWriter
from reshard.training.show.progress_display import ProgressDisplay
from reshard.training.trl import checkpoint_folders
from tests.train.conftest import chats, prompts, write_lines

NOWHERE = Environment({}, [], None, {})


@pytest.fixture
def run(tiny: Callable[..., Path], data: dict[str, Path], tmp_path: Path) -> Run:
    return Run("sft", tiny("qwen3"), data["sft"], tmp_path / "out", eval_data=data["sft-eval"])


def the(message: str, problems: list[Problem]) -> Problem:
    (found,) = (problem for problem in problems if message in problem.message)
    return found


def refused(call: Callable[..., Any], *args: Any) -> Problem:
    with pytest.raises(ReshardError) as caught:
        call(*args)
    (problem,) = caught.value.problems
    return problem


# asked for


def test_data_to_evaluate_on_are_a_flag_a_key_and_part_of_the_record(run: Run, tmp_path: Path) -> None:
    flags = {"model": run.model, "data": run.data, "output": run.output}
    by_flag = run_of("sft", {**flags, "eval_data": run.eval_data})
    by_words = run_of("sft", flags, ["--eval_data", str(run.eval_data), "--eval_steps", "5"])
    config = tmp_path / "run.yaml"
    config.write_text(f"eval-data: {run.eval_data}\n")
    assert by_flag == run_of("sft", flags, config=config) == run
    assert by_words == replace(run, options={"eval_steps": "5"})
    run.output.mkdir()
    record = record_of(run, {})
    assert len(record["eval_data_digest"]) == 64 and record["eval_data_digest"] != record["data_digest"]
    (run.output / RUN_RECORD).write_text(json.dumps(record))
    assert Run.read(run.output) == run
    assert run_of("sft", {"output": run.output, "resume": True}) == replace(run, resume=True)
    assert str(run.eval_data) in words_of(run)


def test_records_of_before_have_none(run: Run) -> None:
    record = run.as_dict()
    del record["eval_data"]
    assert Run.of_dict(record) == replace(run, eval_data=None)


def test_data_to_evaluate_on_may_be_several(run: Run, tmp_path: Path) -> None:
    flags = {"model": run.model, "data": run.data, "output": run.output}
    found = run_of("sft", flags, ["--eval_data", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])
    assert found.eval_data is not None
    assert found.eval_data.paths == [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]


# looked at


def test_they_are_read_and_measured_before_the_start(run: Run) -> None:
    found = preflight(run, environment=NOWHERE)
    assert (found.problems, found.warnings) == ([], [])
    assert found.evaluation is not None and found.evaluation.lengths is not None
    assert (found.records, found.evaluation.records) == (64, 11)
    told = dict(found.rows())["evaluate"]
    assert "11 records" in told and "tokens" in told and "once an epoch, 8 at a time" in told
    assert json.loads(json.dumps(found.as_dict()))["evaluation"]["records"] == 11


def test_wrong_records_are_named_by_line(run: Run, tmp_path: Path) -> None:
    wrong = write_lines(tmp_path / "wrong.jsonl", [*chats()[:2], {"messages": [{"role": "user"}]}])
    found = preflight(replace(run, eval_data=wrong), environment=NOWHERE)
    assert [problem.file for problem in found.problems] == [f"{wrong}:3"]
    nowhere = replace(run, eval_data=tmp_path / "nowhere.jsonl")
    (missing,) = preflight(nowhere, environment=NOWHERE).problems
    assert missing == refused(check, nowhere) and "--eval-data" in str(missing.remedy)


def test_sft_takes_records_of_any_shape_and_dpo_of_one(
    run: Run, data: dict[str, Path], tmp_path: Path
) -> None:
    strings = write_lines(tmp_path / "strings.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 3)
    pairs = replace(run, method="dpo", data=data["dpo"], eval_data=strings)
    problem = the("sources of different shapes", preflight(pairs, environment=NOWHERE).problems)
    assert f"preference pairs as strings in {strings}" in str(problem.found)
    texts = write_lines(tmp_path / "texts.jsonl", [{"text": "The answer is 4."}] * 3)
    assert preflight(replace(run, eval_data=texts), environment=NOWHERE).problems == []
    other = replace(run, eval_data=texts, engine="megatron", options={"seq_length": 64})
    assert preflight(other, environment=NOWHERE).problems == []


def test_columns_that_a_reward_may_miss_are_told(run: Run, tmp_path: Path) -> None:
    asked = write_lines(tmp_path / "asked.jsonl", [{**row, "answer": 4} for row in prompts()])
    told = preflight(
        replace(
            run,
            method="grpo",
            data=asked,
            eval_data=write_lines(tmp_path / "e.jsonl", prompts()[:3]),
            reward=("tests.train.rewards:variety",),
        ),
        environment=NOWHERE,
    )
    assert told.problems == [] and the("lack columns", told.warnings).found == "no answer"


def test_records_that_are_cut_or_teach_nothing_are_told(run: Run) -> None:
    found = preflight(replace(run, options={"max_length": 50}), environment=NOWHERE)
    problem = the("longer than the maximum length", found.warnings)
    assert problem.file == str(run.eval_data) and "7 of 11" in str(problem.found)


def test_files_that_are_kept_apart_are_given_with_eval_data(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train.jsonl", "valid.jsonl", "test.jsonl"):
        write_lines(folder / name, chats()[:4])
    alone = preflight(replace(run, data=folder, eval_data=None), environment=NOWHERE)
    assert [str(each.remedy).count("give it with --eval-data") for each in alone.warnings[:2]] == [1, 1]
    both = preflight(replace(run, data=folder, eval_data=folder / "valid.jsonl"), environment=NOWHERE)
    assert the("used for both training and evaluation", both.warnings).file == str(folder / "valid.jsonl")
    assert the("suggests evaluation data", both.warnings).file == str(folder / "test.jsonl")


def test_a_run_goes_on_with_other_data_to_evaluate_on_and_says_so(run: Run) -> None:
    checkpoint = run.output / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    (checkpoint / RUN_RECORD).write_text(json.dumps({**run.as_dict(), "eval_data_digest": "of other data"}))
    found = preflight(replace(run, resume=True), environment=NOWHERE)
    assert found.problems == []
    assert the("evaluation data have changed", found.warnings).file == str(run.eval_data)


@pytest.mark.parametrize(
    ("method", "said", "expected"),
    [
        ("sft", {"per_device_train_batch_size": 2}, ("epoch", None, 2)),
        ("sft", {"eval_steps": 5}, ("steps", 5, 8)),
        ("sft", {"eval_strategy": "steps"}, ("steps", 500, 8)),
        ("sft", {"eval_strategy": "no", "per_device_eval_batch_size": 3}, ("no", None, 3)),
        ("grpo", {"num_generations": 4, "per_device_train_batch_size": 6}, ("epoch", None, 8)),
        ("grpo", {"num_generations": 4, "num_generations_eval": 3}, ("epoch", None, 9)),
    ],
)
def test_what_is_not_said_of_evaluations_is_sensible(
    method: str, said: dict[str, Any], expected: Any, run: Run
) -> None:
    reward = ("tests.train.rewards:variety",) if method == "grpo" else ()
    told = trl.ENGINE.options(replace(run, method=method, reward=reward, options=said))
    names = ("eval_strategy", "eval_steps", "per_device_eval_batch_size")
    assert tuple(told[name] for name in names) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"eval_steps": 5, "eval_on_start": True}, "every 5 steps and before the first step"),
        ({"eval_steps": 0.1}, "every 10% of the steps"),
        ({"eval_strategy": "no"}, "never"),
    ],
)
def test_when_there_is_an_evaluation_is_said(said: dict[str, Any], expected: str, run: Run) -> None:
    assert expected in trl.ENGINE.evaluation(replace(run, options=said))
    of_megatron = replace(run, engine="megatron", options={"eval_interval": "7", "eval_iters": 2})
    assert megatron.ENGINE.evaluation(of_megatron).startswith(
        "every 7 steps and after the last step, at most 2"
    )


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("trl", {"eval_strategy": "epoch"}),
        ("trl", {"eval_steps": 5}),
        ("trl", {"eval_on_start": True}),
        ("trl", {"save_strategy": "best", "metric_for_best_model": "loss"}),
        ("trl", {"lr_scheduler_type": "reduce_lr_on_plateau"}),
        ("megatron", {"eval_interval": 5}),
        ("megatron", {"eval_iters": 5}),
    ],
)
def test_options_that_need_data_are_refused_without(engine: str, said: dict[str, Any], run: Run) -> None:
    named = engine_named(engine)
    asked = replace(run, engine=engine, options=said)
    assert named.options(asked)
    problem = refused(named.options, replace(asked, eval_data=None))
    assert problem.message == "no evaluation data" and "--eval-data" in str(problem.remedy)


@pytest.mark.parametrize(
    ("said", "cure"),
    [
        ({"save_strategy": "best"}, "--metric_for_best_model loss"),
        ({"lr_scheduler_type": "greedy", "eval_strategy": "no"}, "leave out --eval_strategy"),
        ({"eval_steps": 0}, "correct the value"),
    ],
)
def test_what_evaluations_cannot_give_is_refused(said: dict[str, Any], cure: str, run: Run) -> None:
    assert cure in str(refused(trl.ENGINE.options, replace(run, options=said)).remedy)


def test_the_best_checkpoint_stays_when_others_go(tmp_path: Path) -> None:
    for step in (2, 4, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    checkpoint_folders.rotate(tmp_path, 1, best=2)
    assert {folder.name for folder in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-10"}
    checkpoint_folders.rotate(tmp_path, 1)
    assert [folder.name for folder in tmp_path.iterdir()] == ["checkpoint-10"]


def test_completions_are_evaluated_in_whole_groups(run: Run) -> None:
    options = {"num_generations": 4, "per_device_eval_batch_size": 6}
    asked = replace(run, method="grpo", reward=("tests.train.rewards:variety",), options=options)
    assert trl.ENGINE.batches(asked, 2, 64).steps
    problem = refused(trl.ENGINE.batches, asked, 1, 64)
    assert "--per_device_eval_batch_size 8" in str(problem.remedy)


# told


def rows(*evaluated: int) -> list[MetricsRow]:
    """Four steps of two seconds, and after some of them an evaluation of ten."""
    found: list[MetricsRow] = [{"event": "begin", "steps": 4, "done": 0, "time": 0.0}]
    now = 0.0
    for step in range(1, 5):
        now += 2.0
        found.append({"event": "step", "step": step, "loss": 4.0 / step, "tokens": 10, "time": now})
        if step in evaluated:
            now += 10.0
            measured = {"eval_loss": 5.0 / step, "seconds": 10.0}
            found.append({"event": "eval", "step": step, **measured, "time": now})
    return found


def test_evaluations_take_no_part_in_the_speed() -> None:
    history = History()
    for row in rows(2, 4):
        history.add(row)
    assert history.series("eval_loss") == [(2, 2.5), (4, 1.25)]
    assert history.series("loss")[1] == (2, 2.0)
    assert history.speed == pytest.approx(5.0)
    history.add({"event": "begin", "steps": 4, "done": 2, "time": 100.0})
    assert history.series("eval_loss") == [(2, 2.5)]


def test_each_evaluation_is_a_line_and_a_row(run: Run) -> None:
    run.output.mkdir()
    console = Console(file=StringIO())
    with ProgressDisplay(run, console) as watch:
        monitor = MetricsWriter(run, 0, [watch.add])
        monitor.begin(4)
        monitor.evaluated(2, eval_loss=2.5, eval_mean_token_accuracy=0.75, seconds=1.0)
    assert "evaluated after step 2  loss 2.5000  token accuracy 0.7500\n" in console.file.getvalue()  # type: ignore[attr-defined]
    row = json.loads((run.output / "metrics.jsonl").read_text().splitlines()[-1])
    assert (row["event"], row["step"], row["eval_loss"]) == ("eval", 2, 2.5)
    assert trackers.values(row) == {"eval_loss": 2.5, "eval_mean_token_accuracy": 0.75}


@pytest.mark.parametrize("evaluated", [(), (4,), (2, 4)])
def test_the_report_draws_them_beside_the_loss(evaluated: tuple[int, ...]) -> None:
    history = History()
    for row in rows(*evaluated):
        history.add(row)
    page = html_report.page([html_report.ShownRun("run", {}, history)])
    (loss, *_) = (json.loads(html.unescape(text)) for text in re.findall(r"data-chart='(.*?)'", page))
    beside = [point for each in loss["runs"] for point in each["beside"]]
    assert [step for step, _ in beside] == list(evaluated)
    assert ("on evaluation data" in page) == bool(evaluated)
