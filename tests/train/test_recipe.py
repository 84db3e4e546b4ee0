"""Recipes: the files that are written, what TRL makes of them, and what is refused before anything is written."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import reshard
from reshard.base.errors import ReshardError
from reshard.runs.guard.data.records import as_trl_reads
from reshard.runs.train.methods import TRAINING_METHODS
from tests.commandline import reshard as command
from tests.train.conftest import chats, write_lines

REWARDS = "def score(completions, **columns):\n    return [float(len(str(each))) for each in completions]\n"
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108020000009077"
    "53de0000000c49444154789c63f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
)
"""A picture of one pixel."""
CPU = {"use_cpu": True, "bf16": False}
TURN, ANSWER = {"role": "user", "content": "1"}, {"role": "assistant"}


@pytest.fixture
def write(tiny: Callable[..., Path], data: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """Write a recipe, and return its folder."""

    def get(method: str = "sft", **given: Any) -> Path:
        file = tmp_path / "rewards.py"
        file.write_text(REWARDS)
        rewarded = {"reward": [f"{file}:score"]} if TRAINING_METHODS[method].rewarded else {}
        asked = {"model": tiny(), "data": data[method], "output": tmp_path / "out", "write_only": True}
        return reshard.train(method, **{**asked, **rewarded, **given}).folder

    return get


def command_of(folder: Path) -> list[str]:
    """The words of the command under guard in run.sh."""
    text = (folder / "run.sh").read_text().replace("\\\n", " ")
    line = next(line for line in text.splitlines() if line.startswith("exec "))
    words = shlex.split(line)
    return words[words.index("--") + 1 : -1]


def refused(function: Callable[..., object], *given: Any, **named: Any) -> list[str]:
    with pytest.raises(ReshardError) as caught:
        function(*given, **named)
    assert all(problem.remedy for problem in caught.value.problems)
    return [problem.code for problem in caught.value.problems]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("method", TRAINING_METHODS)
def test_a_script_is_short_and_its_options_are_trls(
    method: str, lora: bool, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import trl
    from trl import ModelConfig, TrlParser

    folder = write(method, lora=lora, nproc=1, options={"learning_rate": 1e-4, **CPU})
    text = (folder / "train.py").read_text()
    assert text.count("\n") <= 60
    tree = ast.parse(text)
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    ours = {"reshard.runs.train.assistant_labels", "reshard.runs.guard.data.records"}
    assert modules <= {"datasets", "trl", "transformers", "rewards", *ours}
    name = TRAINING_METHODS[method].name
    words = command_of(folder)
    assert words[:2] == ["python", "train.py"]
    monkeypatch.chdir(folder)
    config, model = TrlParser((getattr(trl, f"{name}Config"), ModelConfig)).parse_args_and_config(words[2:])
    assert (config.learning_rate, config.use_cpu, model.use_peft) == (1e-4, True, lora)


def test_run_sh_is_one_command_that_bash_reads(write: Callable[..., Path]) -> None:
    folder = write(lora=True, nproc=8, parallel="fsdp2", options={"run_name": "a b"})
    assert subprocess.run(["bash", "-n", str(folder / "run.sh")]).returncode == 0
    text = (folder / "run.sh").read_text()
    assert "reshard guard --log log --final final --overwrite --merge --" in text and text.rstrip().endswith(
        '"$@"'
    )
    words = command_of(folder)
    assert words[:5] == ["accelerate", "launch", "--config_file", "accelerate.yaml", "train.py"]
    assert words[words.index("--run_name") + 1] == "a b"
    config = yaml.safe_load((folder / "accelerate.yaml").read_text())
    assert config["num_processes"] == 8 and config["fsdp_config"]["fsdp_version"] == 2


@pytest.mark.parametrize("plan", ["ddp", "fsdp2", "zero2", "zero3"])
def test_accelerate_reads_its_config(plan: str, write: Callable[..., Path]) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    folder = write(parallel=plan, nproc=2, nnodes=2)
    config = load_config_from_file(str(folder / "accelerate.yaml"))
    assert (config.num_machines, config.num_processes) == (2, 4)
    assert "${MASTER_ADDR" in (folder / "run.sh").read_text()


def test_a_template_with_marks_needs_no_labels_of_ours(
    write: Callable[..., Path], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    assert "assistant_labels" in (write() / "train.py").read_text()
    model = tmp_path / "marked"
    model.mkdir()
    for file in tiny().iterdir():
        (model / file.name).symlink_to(file)
    (model / "chat_template.jinja").unlink()
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    folder = write(model=model, output=tmp_path / "other")
    assert "assistant_labels" not in (folder / "train.py").read_text()
    assert "--assistant_only_loss" in command_of(folder)


ANSWERS = {"chosen": "3", "rejected": "4"}


@pytest.mark.parametrize(
    ("method", "row", "expected"),
    [
        (
            "sft",
            {"instruction": "Add", "input": "1 2", "output": "3", "history": [["Hi", "Hello"]]},
            {"messages": ["user: Hi", "assistant: Hello", "user: Add\n1 2", "assistant: 3"]},
        ),
        (
            "sft",
            {"conversations": [{"from": "human", "value": "1 2"}, {"from": "gpt", "value": "3"}]},
            {"messages": ["user: 1 2", "assistant: 3"]},
        ),
        (
            "dpo",
            {"instruction": "Add", "input": "1 2", **ANSWERS},
            {"prompt": ["user: Add\n1 2"], "chosen": ["assistant: 3"], "rejected": ["assistant: 4"]},
        ),
        (
            "dpo",
            {"prompt": "1", **{name: [TURN, {**ANSWER, "content": text}] for name, text in ANSWERS.items()}},
            {name: ["user: 1", f"assistant: {text}"] for name, text in ANSWERS.items()},
        ),
    ],
    ids=["Alpaca with a history", "ShareGPT", "Alpaca's pairs", "answers that repeat the prompt"],
)
def test_records_that_trl_reads_otherwise_are_rewritten(
    method: str, row: Any, expected: Any, write: Callable[..., Path], tmp_path: Path
) -> None:
    """In the script, with what the same columns are in the check before the start."""
    import datasets

    text = (write(method, data=write_lines(tmp_path / "a.jsonl", [row, row])) / "train.py").read_text()
    begin, end = (
        text.index("train_data ="),
        text.index("tokenizer =") if method == "sft" else text.index("trainer ="),
    )
    names = {"load_dataset": datasets.load_dataset, "as_trl_reads": as_trl_reads}
    exec(text[begin:end], names)
    found = names["train_data"][0]
    assert {
        key: [f"{turn['role']}: {turn['content']}" for turn in turns] for key, turns in found.items()
    } == expected


def test_images_are_opened_by_datasets_and_their_labels_are_trls(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    turns = [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "A cat."}]
    row: dict[str, object] = {"messages": turns, "images": [str(tmp_path / "a.png")]}
    folder = write(data=write_lines(tmp_path / "a.jsonl", [row]))
    text = (folder / "train.py").read_text()
    assert 'cast_column("images", List(Image()))' in text and "assistant_labels" not in text
    assert "--assistant_only_loss" in command_of(folder)
    for wrong, code in {
        "a.png": "image-path-relative",
        str(tmp_path / "b.png"): "image-missing",
    }.items():
        path = write_lines(tmp_path / "b.jsonl", [{**row, "images": [wrong]}])
        assert code in refused(write, data=path, output=tmp_path / "other")
    parts = [{"role": "user", "content": [{"type": "image", "image": str(tmp_path / "a.png")}]}, turns[1]]
    path = write_lines(tmp_path / "c.jsonl", [{"messages": parts}])
    assert refused(write, data=path, output=tmp_path / "other") == ["images-not-in-column"]


def test_what_is_wrong_is_said_at_once_and_nothing_is_written(
    write: Callable[..., Path], data: dict[str, Path], tmp_path: Path
) -> None:
    wrong = write_lines(tmp_path / "wrong.jsonl", [*chats()[:2], {"messages": []}])
    asked = {"data": wrong, "reward": ["rewards"]}
    assert refused(write, **asked) == ["chat-without-messages", "reward-names-no-function", "reward-not-used"]
    assert refused(write, "grpo", reward=None) == ["reward-missing"]
    assert refused(reshard.train, "sft", output=tmp_path / "out") == ["option-missing", "option-missing"]
    assert refused(reshard.train, "sft", output=tmp_path, resume=True) == ["recipe-not-found"]
    assert refused(write, parallel="fsdp2", options=CPU) == ["plan-needs-gpus"]
    assert refused(write, data=tmp_path / "none.jsonl") == ["data-not-found"]
    assert not (tmp_path / "out").exists()


def test_a_model_is_a_hugging_face_folder_and_the_output_is_a_folder(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    megatron = Path(__file__).parents[2] / "examples/megatron-run"
    assert refused(write, model=megatron) == ["model-not-huggingface"]
    assert refused(write, model=str(tmp_path / "absent")) == ["model-not-huggingface"]
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    assert refused(write, output=file) == ["output-is-file"] and file.read_text() == "mine"
    assert not (tmp_path / "out").exists()


def test_without_a_start_resume_shows_the_command_and_writes_nothing(write: Callable[..., Path]) -> None:
    folder = write()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    shown = command("train", "sft", "-o", str(folder), "--resume", "--write-only", "--max_steps", "9").out
    assert shown == f"found {folder}; start it: bash {folder / 'run.sh'} --max_steps 9\n"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_recipe_is_not_replaced_without_being_told(write: Callable[..., Path]) -> None:
    folder = write()
    (folder / "train.py").write_text("# mine")
    assert refused(write) == ["output-has-recipe"]
    assert (folder / "train.py").read_text() == "# mine"
    assert write(overwrite=True) == folder
    assert (folder / "train.py").read_text() != "# mine"


@pytest.mark.thorough
def test_a_run_ends_with_a_checked_folder_and_a_changed_script_runs_again(
    write: Callable[..., Path], tiny: Callable[..., Path]
) -> None:
    steps = {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-3, "per_device_train_batch_size": 2}
    folder = write(nproc=2, options={**CPU, **steps, "report_to": "none"})
    done = subprocess.run(["bash", folder / "run.sh"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((folder / "final/config.json").read_text())["model_type"] == "qwen3"
    assert reshard.verify(folder / "checkpoint-4", folder / "final").equal
    assert not reshard.verify(tiny(), folder / "final").equal
    script = folder / "train.py"
    script.write_text(script.read_text().replace("trainer.train(", 'print("changed")\ntrainer.train('))
    again = reshard.train("sft", output=folder, resume=True, options={"max_steps": 6}, write_only=True)
    assert again.command[2:4] == ("--resume_from_checkpoint", str(folder / "checkpoint-4"))
