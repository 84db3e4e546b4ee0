"""Flags, a config file and the engine's own options become one run."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reshard.base.errors import ReshardError
from reshard.training.option_names import renamed
from reshard.training.run import Run
from reshard.training.run_request import check, run_of, words


def given(tmp_path: Path, **flags: Any) -> dict[str, Any]:
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text("{}\n")
    paths = {"model": tmp_path / "model", "data": tmp_path / "data.jsonl", "output": tmp_path / "out"}
    return {**paths, **flags}


def test_words_become_options() -> None:
    typed = ["--learning-rate", "1e-5", "--packing", "--lora_target_modules", "q_proj", "v_proj", "--x=-1"]
    assert renamed(words(typed)) == {
        "learning_rate": "1e-5",
        "packing": True,
        "lora_target_modules": ["q_proj", "v_proj"],
        "x": "-1",
    }


def test_a_word_that_belongs_to_no_option_is_refused() -> None:
    with pytest.raises(ReshardError, match="does not belong to an option"):
        words(["1e-5"])


def test_flags_come_before_the_config(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("learning-rate: 2.0e-5\ntp: 4\nparallel: fsdp2\nlora: true\n")
    run = run_of("sft", given(tmp_path, tp=1), ["--learning_rate", "1e-4"], config)
    assert (run.parallel, run.layout.tp, run.lora) == ("fsdp2", 1, True)
    assert run.options == {"learning_rate": "1e-4"}


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        (["--learning-rate", "1", "--learning_rate", "2"], "--learning-rate 1, --learning_rate 2"),
        (["--x", "1", "--x=2"], "--x 1, --x 2"),
        (["--output_dir", "/elsewhere"], "--output_dir /elsewhere, --output {0}/out"),
        (["--use_peft", "false"], "--use_peft false, --lora true"),
    ],
)
def test_an_option_with_two_values_is_refused(tmp_path: Path, typed: list[str], found: str) -> None:
    with pytest.raises(ReshardError) as raised:
        run_of("sft", given(tmp_path, lora=True), typed)
    ((code, told),) = [(each.code, each.found) for each in raised.value.problems]
    assert (code, told) == ("option-given-twice", found.format(tmp_path))


def test_an_option_given_twice_with_one_value_is_that_value(tmp_path: Path) -> None:
    flags, typed = given(tmp_path, lora=True), ["--x", "1", "--x", "1", "--use_peft", "true"]
    run = run_of("sft", flags, [*typed, "--output_dir", str(flags["output"])])
    assert run.options == {"x": "1"} and run.lora


def test_keys_that_a_config_repeats_are_refused(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "base: &base {a: 1}\nlr: 1\nmodel_init_kwargs:\n  <<: *base\n  a: 2\n  b: 1\n  b: 2\nlr: 1\n"
    )
    with pytest.raises(ReshardError) as raised:
        run_of("sft", given(tmp_path), config=config)
    assert {each.message: each.found for each in raised.value.problems} == {
        "lr is set more than once": "lines 2, 8",
        "b is set more than once": "lines 6, 7",
    }
    config.write_text("learning-rate: 1\nlearning_rate: 2\n")
    with pytest.raises(ReshardError, match="learning-rate: 1, learning_rate: 2"):
        run_of("sft", given(tmp_path), config=config)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = run_of("grpo", given(tmp_path, reward="rewards:short", nproc="auto"), ["--beta", "0.1"])
    record = tmp_path / "run.json"
    record.write_text(json.dumps({**run.as_dict(), "versions": {"torch": "2.13.0"}}))
    assert Run.read(tmp_path) == run


def test_what_is_resumed_need_not_be_told_again(tmp_path: Path) -> None:
    first = run_of("sft", given(tmp_path, engine="megatron", tp=2, nproc="4"), ["--lr", "1e-4"])
    first.output.mkdir()
    (first.output / "run.json").write_text(json.dumps(first.as_dict()))
    again = run_of("sft", {"output": first.output, "resume": True, "tp": 1, "pp": 2})
    assert again == replace(first, resume=True, layout=replace(first.layout, tp=1, pp=2))


def test_everything_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(ReshardError) as caught:
        run_of("sft", {"model": Path("m")})
    assert [problem.message for problem in caught.value.problems] == [
        "--data is missing",
        "--output is missing",
    ]


@pytest.mark.parametrize(
    ("flags", "method", "message"),
    [
        ({"engine": "megatron"}, "dpo", "trains with SFT only"),
        ({"engine": "megatron", "parallel": "zero3"}, "sft", "no such parallelism"),
        ({"pp": 2}, "sft", "no pipeline"),
        ({"parallel": "ddp", "tp": 2}, "sft", "disagree"),
        ({}, "grpo", "needs a reward"),
        ({"reward": "a:b"}, "sft", "takes no reward"),
        ({"model": Path("nowhere")}, "sft", "not a Hugging Face model folder"),
        ({"data": Path("nowhere")}, "sft", "there is no data"),
    ],
)
def test_what_cannot_be_together_is_refused(
    tmp_path: Path, flags: dict[str, Any], method: str, message: str
) -> None:
    with pytest.raises(ReshardError, match=message):
        check(run_of(method, given(tmp_path, **flags)))


def test_a_weight_that_is_no_number_is_told_from_a_path(tmp_path: Path) -> None:
    there = given(tmp_path)
    with pytest.raises(ReshardError) as caught:
        check(run_of("sft", {**there, "data": [f"{there['data']}:0,7"]}))
    assert str(caught.value.problems[0].remedy).startswith("0,7 is not a number")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("nan_steps", value) for value in (0, -1, True, 1.5, ".inf", "many", "-1", 2**31)],
        *[("save_on_signal", value) for value in (-1, False, 0.5)],
        *[("tp", value) for value in (0, "0")],
        ("nproc", 0),
    ],
)
def test_a_config_has_numbers_that_mean_something(tmp_path: Path, name: str, value: object) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"{name}: {value}\n")
    with pytest.raises(ReshardError, match=f"--{name.replace('_', '-')} has a wrong value"):
        run_of("sft", given(tmp_path), (), config)


def test_a_config_may_quote_a_number(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("nan_steps: '3'\nnode_rank: 0\nsave_on_signal: 0\n")
    run = run_of("sft", given(tmp_path), (), config)
    assert (run.nan_steps, run.ranks.node_rank, run.save_on_signal) == (3, 0, 0)


def test_a_config_names_the_nearest_choice(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("parallel: fsdp\nengine: megatron-lm\n")
    with pytest.raises(ReshardError) as caught:
        run_of("sft", given(tmp_path), config=config)
    assert [problem.remedy for problem in caught.value.problems] == [
        "did you mean megatron?",
        "did you mean fsdp2?",
    ]


def test_a_run_that_is_not_there_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match="no run to resume"):
        run_of("sft", {"output": tmp_path / "nowhere", "resume": True})


def test_switches_of_a_config_are_true_or_false_in_every_spelling(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    for text, expected in (
        ("lora: 'no'", False),
        ("lora: off", False),
        ("lora: yes", True),
        ("lora: 1", True),
    ):
        config.write_text(text)
        assert run_of("sft", given(tmp_path), config=config).lora is expected
    config.write_text("lora: maybe")
    with pytest.raises(ReshardError, match="neither true nor false"):
        run_of("sft", given(tmp_path), config=config)


MIXTURE = """
env: {TESTED_BY_RESHARD: 3, WANDB_PROJECT: mine}
datasets:
  - path: FOLDER/data.jsonl
  - path: json
    data_files: [FOLDER/more.jsonl]
    split: train
  - {path: FOLDER, data_dir: sub, fraction: null}
streaming: true
"""


def test_a_config_of_trl_names_a_mixture_and_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paths are those from which TRL itself would load its training data."""
    monkeypatch.setenv("TESTED_BY_RESHARD", "before")
    monkeypatch.setenv("WANDB_PROJECT", "before")
    config = tmp_path / "sft.yaml"
    config.write_text(MIXTURE.replace("FOLDER", str(tmp_path)))
    flags = given(tmp_path)
    data = flags.pop("data")
    run = run_of("sft", flags, (), config)
    assert run.data.paths == [data, tmp_path / "more.jsonl", tmp_path / "sub"] and not run.options
    assert (os.environ["TESTED_BY_RESHARD"], os.environ["WANDB_PROJECT"]) == ("3", "mine")
    assert run_of("sft", {**flags, "data": data}, (), config).data.paths == [data], "flags come first"
    assert Run.of_dict(json.loads(json.dumps(run.as_dict()))) == run


@pytest.mark.parametrize(
    ("config", "code", "said"),
    [
        ("env: [A]", "train-env-malformed", "env: {"),
        ("env: {A: [1]}", "train-env-malformed", "env: {"),
        ("datasets: [a.jsonl]", "train-datasets-malformed", "`path`"),
        ("datasets: [{path: a.jsonl, fration: 1}]", "train-datasets-malformed", "did you mean fraction?"),
        ("datasets: [{path: a.jsonl, fraction: 0.3}]", "train-datasets-malformed", "PATH:WEIGHT"),
        ("datasets: [{path: a.jsonl, columns: [text]}]", "train-datasets-malformed", "--data-shape"),
        ("datasets: [{path: a.jsonl, split: test}]", "train-datasets-malformed", "name the files"),
        ("datasets: [{path: json}]", "train-datasets-malformed", "data_files"),
        ("datasets: [{path: Org/Set, data_dir: x}]", "train-datasets-malformed", "leave out data_files"),
        ("datasets: [{path: a.jsonl}]\ndata: b.jsonl", "data-named-twice", "leave out one"),
        ("datasets: [{path: a.jsonl}]\ntest_split_size: 0.1", "dataset-test-split-size", "--eval-data"),
    ],
)
def test_a_mixture_that_is_read_otherwise_is_refused(
    tmp_path: Path, config: str, code: str, said: str
) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(config)
    flags = given(tmp_path)
    del flags["data"]
    with pytest.raises(ReshardError) as refused:
        run_of("sft", flags, (), file)
    assert {each.code for each in refused.value.problems} == {code} and said in str(refused.value)
