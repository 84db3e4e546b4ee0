"""Options that a script's parser no longer accepts stop the start exactly if the run would end with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import HfArgumentParser, TrainingArguments
from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

from tests.guard.test_before import checked, the

OF_TRANSFORMERS = """\
from dataclasses import dataclass
from transformers import HfArgumentParser, TrainingArguments

@dataclass
class Own(TrainingArguments):
    extra: str = "a"

(args,) = HfArgumentParser(Own).parse_args_into_dataclasses()
"""
OF_TRL = """\
from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
args = parser.parse_args_and_config()
"""


@dataclass
class Own(TrainingArguments):
    """As in the script."""

    extra: str = "a"


OPTIONS = (
    "--evaluation_strategy no",
    "--eval_strategy no",
    "--eval_strat no",
    "--evaluation-strategy=no",
    "--per_gpu_train_batch_size 2",
    "--no_cuda",
    "--fp16_backend auto",
    "--save_safetensors True",
    "--overwrite_output_dir",
    "--warmup_ratio 0.1",
    "--learning-rate 1e-5",
)
OPTIONS_OF_TRL = ("--max_seq_length 12", "--max_length 12", "--dataset_batch_size 3", "--use_peft --lora_r 4")


@pytest.mark.parametrize("options", (*OPTIONS, "--extra b"))
def test_an_option_of_an_older_transformers(options: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OF_TRANSFORMERS)
    found = checked(f"python train.py --output_dir out --use_cpu {options}", tmp_path)
    words = ["--output_dir", "out", "--use_cpu", *options.split()]
    *_, unknown = HfArgumentParser(Own).parse_args_into_dataclasses(
        args=words, return_remaining_strings=True, look_for_args_file=False
    )
    assert bool(found.errors) == bool(unknown)


@pytest.mark.parametrize("options", (*OPTIONS, *OPTIONS_OF_TRL))
def test_an_option_of_an_older_trl(options: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OF_TRL)
    common = f"--output_dir out --dataset_name x --use_cpu --bf16 False {options}"
    commands = (f"python train.py {common}", f"trl sft --model_name_or_path m {common}")
    stopped = {bool(checked(command, tmp_path).errors) for command in commands}
    *_, unknown = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_into_dataclasses(
        args=common.split(), return_remaining_strings=True, look_for_args_file=False
    )
    assert stopped == {bool(unknown)}


def test_the_new_name_is_told_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OF_TRANSFORMERS)
    (tmp_path / "run.sh").write_text("set -e\npython train.py --output_dir out --evaluation_strategy no\n")
    problem = the("script-removed-keyword", checked("bash run.sh", tmp_path))
    assert "run.sh:2" in str(problem) and "Replace --evaluation_strategy with --eval_strategy" in str(problem)
    assert problem.message == "TrainingArguments no longer accepts --evaluation_strategy"


@pytest.mark.parametrize(
    "script",
    [
        OF_TRANSFORMERS.replace("classes()", "classes(return_remaining_strings=True)"),
        OF_TRANSFORMERS.replace("classes()", "classes(['--output_dir', 'out'])"),
        OF_TRANSFORMERS.replace('    extra: str = "a"', '    evaluation_strategy: str = "no"'),
        OF_TRANSFORMERS.replace("Own)", "(Own, Other))").replace(
            "from trans", "from my import Other\nfrom trans"
        ),
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--evaluation_strategy')\n",
    ],
    ids=["remaining", "own words", "own field", "unknown class", "argparse"],
)
def test_a_script_that_may_accept_the_option_starts(script: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    assert checked("python train.py --output_dir out --evaluation_strategy no", tmp_path).errors == []


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ("python train.py --config run.yaml", "error"),
        ("trl sft --config run.yaml", "error"),
        ("python -m trl.scripts.sft --config run.yaml", "warning"),  # TRL's own scripts ignore unknown keys
        ("python own.py --config run.yaml", "warning"),
    ],
)
def test_a_config_stops_only_what_refuses_its_keys(line: str, severity: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OF_TRL)
    (tmp_path / "own.py").write_text("import yaml\nprint(yaml.safe_load(open('run.yaml')))\n")
    (tmp_path / "run.yaml").write_text("output_dir: out\nevaluation_strategy: 'no'\n")
    assert the("script-removed-keyword", checked(line, tmp_path)).severity == severity
