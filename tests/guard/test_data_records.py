"""Data files of any script with a trainer of TRL: wrong records are named by file and line before the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.runs.checks.command.read_command import read_command
from reshard.runs.guard.before.data_records import data_problems

SCRIPT = """\
from datasets import load_dataset
from trl import {name}Config, {name}Trainer

data = load_dataset("json", data_files={files})
trainer = {name}Trainer(model="m", args={name}Config(output_dir="out"), train_dataset=data["train"])
trainer.train()
"""
GOOD, WRONG = '{"prompt": "a", "completion": "b"}\n', '{"prompt": "a"}\n'


def found(folder: Path, script: str, *words: str) -> list[tuple[str, str | None]]:
    (folder / "train.py").write_text(script)
    command = read_command(("python", "train.py", *words), {}, folder)
    return [(each.code, each.file) for each in data_problems(command)]


@pytest.mark.parametrize(
    "files", ['"a.jsonl"', '["a.jsonl"]', '{"train": "a.jsonl"}', '{"train": ["a.jsonl"]}']
)
def test_a_wrong_record_is_named_by_file_and_line(files: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD + WRONG)
    assert found(tmp_path, SCRIPT.format(name="SFT", files=files)) == [
        ("columns-missing", f"{tmp_path}/a.jsonl:2")
    ]


def test_a_file_among_the_options_is_found_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(WRONG + "3\n")
    script = SCRIPT.format(name="DPO", files="script.dataset_name")
    assert found(tmp_path, script, "--dataset_name", "a.jsonl") == [
        ("columns-missing", f"{tmp_path}/a.jsonl:1"),
        ("record-not-an-object", f"{tmp_path}/a.jsonl:2"),
    ]


@pytest.mark.parametrize(
    "script",
    [
        SCRIPT.format(name="SFT", files='"other.jsonl"'),
        SCRIPT.format(name="SFT", files='"a.jsonl"') + "data = data.map(str)\n",
        SCRIPT.format(name="Own", files='"a.jsonl"'),
    ],
)
def test_what_the_trainer_may_not_see_as_it_stands_is_not_checked(script: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(WRONG)
    assert found(tmp_path, script) == []


def test_lines_that_are_not_json_are_named_for_any_script(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(WRONG + "{\n")
    script = SCRIPT.format(name="Own", files='"a.jsonl"')
    assert found(tmp_path, script) == [("line-not-json", f"{tmp_path}/a.jsonl:2")]
