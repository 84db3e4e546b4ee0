"""Flags, a config file and the engine's own options become one run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reshard.errors import ReshardError
from reshard.train.request import check, run_of, words
from reshard.train.run import Run


def given(tmp_path: Path, **flags: Any) -> dict[str, Any]:
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text("{}\n")
    paths = {"model": tmp_path / "model", "data": tmp_path / "data.jsonl", "output": tmp_path / "out"}
    return {**paths, **flags}


def test_words_become_options() -> None:
    typed = ["--learning-rate", "1e-5", "--packing", "--lora_target_modules", "q_proj", "v_proj", "--x=-1"]
    assert words(typed) == {
        "learning_rate": "1e-5",
        "packing": True,
        "lora_target_modules": ["q_proj", "v_proj"],
        "x": "-1",
    }


def test_a_word_that_belongs_to_no_option_is_refused() -> None:
    with pytest.raises(ReshardError, match="belongs to no option"):
        words(["1e-5"])


def test_flags_come_before_the_config(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("learning-rate: 2.0e-5\ntp: 4\nparallel: fsdp2\nlora: true\n")
    run = run_of("sft", given(tmp_path, tp=1), ["--learning_rate", "1e-4"], config)
    assert (run.parallel, run.layout.tp, run.lora) == ("fsdp2", 1, True)
    assert run.options == {"learning_rate": "1e-4"}


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
