"""Rows that are tokens already: trained on as TRL does, and wrong ones are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reshard.base.errors import ReshardError
from reshard.checks.environment import Environment
from reshard.training.data import read_records
from reshard.training.data.pretokenized import learned
from reshard.training.preflight import preflight
from tests.train.conftest import write_lines
from tests.train.trl_plans import run_of
from tests.train.trl_runs import train

NOWHERE = Environment({}, [], None, {})
EVAL = {"eval_steps": None, "eval_on_start": False}


def rows(**beside: Any) -> list[dict[str, Any]]:
    """16 rows of 8 tokens."""
    return [{"input_ids": [5 + n, 9, 7, 20 + n, 11, 12, 30, 2], **beside} for n in range(16)]


MASKED = {"assistant_masks": [0, 0, 1, 1, 1, 1, 1, 1], "completion_mask": [0, 0, 0, 1, 1, 1, 1, 1]}


@pytest.mark.thorough
@pytest.mark.parametrize("labelled", [True, False])
def test_losses_are_those_of_plain_trl_to_the_bit(
    labelled: bool, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
    from trl import SFTConfig, SFTTrainer

    data = [
        {**row, "labels": [-100] * 3 + row["input_ids"][3:]} if labelled else {**row, **MASKED}
        for row in rows()
    ]
    path = write_lines(tmp_path / "data.jsonl", data)
    run = run_of("one", "sft", tiny("qwen3"), path, tmp_path / "out", False, 1, EVAL)
    assert preflight(run, environment=NOWHERE).problems == []
    done = train(run, 1)
    assert not done.failed, done.log
    settings = {
        name: value for name, value in run.options.items() if "eval" not in name and name != "save_steps"
    }
    settings |= {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
    }
    set_seed(42)
    plain = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(run.model, dtype="float32"),
        args=SFTConfig(str(tmp_path), completion_only_loss=not labelled or None, **settings),
        train_dataset=Dataset.from_list(data),
        processing_class=AutoTokenizer.from_pretrained(run.model),
    )
    plain.train()
    assert done.losses == [row["loss"] for row in plain.state.log_history if "loss" in row]


def test_the_completion_is_not_masked_without_its_option() -> None:
    row = rows(**MASKED)[0]
    assert learned(row, completion_only=True).index(True) == 3
    assert learned(row, completion_only=False).index(True) == 2
    assert all(learned(rows()[0], completion_only=True))


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"input_ids": [1, -2]}, "tokens-not-ids"),
        ({"input_ids": []}, "tokens-not-ids"),
        ({"input_ids": "1 2"}, "tokens-not-ids"),
        ({"input_ids": [1, 2], "labels": [1]}, "tokens-of-several-lengths"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "labels-differ-from-tokens"),
    ],
)
def test_wrong_rows_are_named_by_line(row: dict[str, Any], code: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "data.jsonl", [*rows()[:1], row])
    with pytest.raises(ReshardError) as raised:
        list(read_records(path, "sft"))
    assert [(each.code, each.file) for each in raised.value.problems] == [(code, f"{path}:2")]


def test_ids_beyond_the_embedding_are_found_before_the_start(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "data.jsonl", [*rows(), {"input_ids": [1, 70000]}])
    run = run_of("one", "sft", tiny("qwen3"), path, tmp_path / "out", False, 1, EVAL)
    assert [each.code for each in preflight(run, environment=NOWHERE).problems] == ["tokens-not-ids"]
