"""`reshard train` and `reshard export` on the command line: help, refusals, and no output after a refusal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from reshard.training.methods import TRAINING_METHODS
from tests.commandline import reshard

FLAGS = (
    "--model --model-revision --data --eval-data --dataset-config --dataset-train-split --dataset-test-split "
    "--data-shape --system --token-cache --no-token-cache "
    "--output --engine --lora --full --parallel --tp --pp --vpp --ep --cp --nproc --nnodes "
    "--node-rank --rendezvous --slurm --reward --merge --no-merge --nan-steps --save-on-signal --max-restarts "
    "--resume --config --dry-run --gpus --gpu-memory --overwrite --options --quiet --json --debug --help"
)


@pytest.mark.parametrize("method", TRAINING_METHODS)
def test_help_tells_every_flag(method: str) -> None:
    result = reshard("train", method, "--help")
    assert result.code == 0
    listed = re.findall(r"(?m)^ +(?:-\w, )?(--[a-z-]+)(?: / (--[a-z-]+))?", result.out)
    assert {flag for pair in listed for flag in pair if flag} == set(FLAGS.split())


LOADED = """
import sys
from reshard.cli import main
if "--help" not in sys.argv:
    from reshard.training.launching import launch

    launch.launch = lambda *given, **named: sys.exit(7)
status = 0
try:
    main(sys.argv[1:])
except SystemExit as end:
    status = end.code
heavy = {"torch", "transformers", "trl", "megatron"} | ({"numpy"} if "--help" in sys.argv else set())
print(status, sorted(heavy & set(sys.modules)))
"""
"""A command whose ranks do not train; the last line is its status, and which packages were imported."""


def loaded(*words: str | Path) -> str:
    command = [sys.executable, "-c", LOADED, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]


def test_help_loads_no_framework() -> None:
    assert loaded("train", "sft", "--help") == "0 []"


@pytest.mark.core("wrong0")
@pytest.mark.parametrize(
    "wrong", [("--learning_rat", "1e-5"), ("--data", "nothing"), ("--data", "bad.jsonl")]
)
def test_what_is_wrong_in_options_and_data_is_told_without_a_framework(
    wrong: tuple[str, str],
    tmp_path: Path,
    tiny: Callable[..., Path],
    data: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    given = ("--model", tiny(), "--data", data["sft"], "-o", tmp_path / "out")
    assert loaded("train", "sft", *given[: 2 if "--data" in wrong else 4], *given[4:], *wrong) == "2 []"


@pytest.mark.thorough
def test_the_launcher_needs_no_framework_until_the_ranks_have_trained(
    tmp_path: Path, tiny: Callable[..., Path], data: dict[str, Path]
) -> None:
    """The first rank makes the rest of the preflight, which knows what only the packages know."""
    words = ("train", "sft", "--model", tiny(), "--data", data["sft"], "-o", tmp_path / "out", "--nproc", "1")
    assert loaded(*words, "--lr_scheduler_type", "cosine") == "7 []"
    assert loaded(*words, "--lr_scheduler_kwargs", '{"foo": 1}') == "2 []"


def refused(tmp_path: Path, *words: str) -> list[str]:
    """The messages of a command that is refused, which leaves no output."""
    result = reshard("train", *words, "-o", tmp_path / "out", "--json")
    assert result.code == 2, result.out + result.err
    assert not (tmp_path / "out").exists() and "Traceback" not in result.err
    return [problem["message"] for problem in json.loads(result.out)["problems"]]


def test_what_is_wrong_is_told_at_once(
    tmp_path: Path, tiny: Callable[..., Path], data: dict[str, Path]
) -> None:
    model = str(tiny())
    assert refused(tmp_path, "sft") == ["--model is missing", "--data is missing"]
    assert refused(tmp_path, "sft", "--model", "nowhere", "--data", "nothing")[:2] == [
        "not a Hugging Face model folder",
        "there is no data",
    ]
    wrong = ("--max_step", "3", "--tokenizer", "x")
    assert refused(tmp_path, "sft", "--model", model, "--data", str(data["sft"]), *wrong) == [
        "SFTConfig has no option max_step",
        "SFTConfig has no option tokenizer",
    ]


def test_a_config_that_spreads_the_model_is_refused_with_the_cure(
    tmp_path: Path, tiny: Callable[..., Path], data: dict[str, Path]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {tiny('qwen2')}\ndata: {data['sft']}\nlora: true\ndevice_map: auto\n")
    result = reshard("train", "sft", "--config", config, "-o", tmp_path / "out")
    assert result.code == 2 and "device_map=None" in result.err and f"{config}:4" in result.err


def test_what_the_doctor_finds_is_told_as_other_problems_are(
    tmp_path: Path, folder: Path, data: dict[str, Path]
) -> None:
    """As JSON, which must conform to the published schema."""
    (folder / "chat_template.jinja").unlink()
    words = ["--model", folder, "--data", data["sft"], "-o", tmp_path / "out", "--dry-run", "--json"]
    (problem,) = reshard("train", "sft", *words).json["problems"]
    assert (problem["code"], problem["file"]) == ("checkpoint-no-template", str(folder))
    assert problem["message"] == "the tokenizer has no chat template"


@pytest.mark.slow
def test_a_run_that_diverges_fails_and_names_the_checkpoint_to_go_on_from(
    tmp_path: Path, tiny: Callable[..., Path], data: dict[str, Path]
) -> None:
    words = ["--model", tiny("qwen3"), "--data", data["sft"], "-o", tmp_path / "out", "--nproc", "1"]
    steps = [
        "--learning_rate",
        "1e30",
        "--lr_scheduler_type",
        "constant",
        "--max_steps",
        "4",
        "--save_steps",
        "1",
    ]
    result = reshard("train", "sft", *words, *steps)
    assert result.code == 1, result.err
    assert "training diverged" in result.err and "step 2:" in result.err
    assert f"the last complete checkpoint: {tmp_path / 'out/checkpoint-1'}" in result.err
    assert not (tmp_path / "out/final").exists() and not (tmp_path / "out/final.unchecked").exists()


def test_a_checkpoint_without_a_record_cannot_be_exported(tiny: Callable[..., Path], tmp_path: Path) -> None:
    result = reshard("export", tiny(), tmp_path / "model")
    assert result.code == 2 and "no record of a run found" in result.err and "--base" in result.err
