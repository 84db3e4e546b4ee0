"""What stops a command before it starts, and what does not."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reshard.base.errors import Problem
from reshard.runs.checks.command.read_command import read_command
from reshard.runs.guard.before import resources
from reshard.runs.guard.before.command_checks import Checked, check_command
from tests.environments import python
from tests.guard.commands import FILES

FIELD_REPORT = """\
import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("model", torch_dtype=torch.bfloat16, device_map="auto")
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
data = load_dataset("json", data_files="data.jsonl")["train"]
trainer = Trainer(model=model, args=TrainingArguments(output_dir="out"), train_dataset=data)
trainer.train()
"""
"""LoRA with device_map="auto", which was started with torchrun --nproc-per-node 2, transformers 4.53."""
PLAIN = (
    "from transformers import Trainer, TrainingArguments\nTrainer(args=TrainingArguments(output_dir='out'))\n"
)


def checked(line: str, folder: Path, **variables: str) -> Checked:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HF_HOME": str(folder),
    }
    return check_command(read_command(shlex.split(line), {**environment, **variables}, folder))


def the(code: str, found: Checked) -> Problem:
    (problem,) = (each for each in found.problems if each.code == code)
    return problem


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PLAIN)
    return tmp_path


# ------------------------------------------------------------------------------------------- the field report


def test_a_device_map_is_stopped_under_two_processes_and_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FIELD_REPORT)
    two = checked("torchrun --nproc-per-node 2 train.py", tmp_path)
    problem = the("script-device-map", two)
    assert problem in two.errors
    assert f"{tmp_path}/train.py:6  model = AutoModel" in str(problem) and "<<" not in str(problem)
    for line in (
        "python train.py",
        "torchrun --nproc-per-node 1 train.py",
        "accelerate launch --cpu train.py",
    ):
        assert checked(line, tmp_path).problems == []


MODEL = """\
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained("model")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "codes"),
    [
        (
            "-m torch.distributed.run --standalone --nproc-per-node 2",
            ["env-device-map-tp", "script-device-map"],
        ),
        ("-m torch.distributed.run --standalone --nproc-per-node 1", ["env-device-map-tp"]),
        ("", []),
    ],
)
def test_the_field_report_in_its_own_environment(launch: str, codes: list[str], tmp_path: Path) -> None:
    """What is stopped fails, and what is not trains."""
    short = 'output_dir="out", max_steps=1, use_cpu=True, report_to=[]'
    (tmp_path / "train.py").write_text(FIELD_REPORT.replace('output_dir="out"', short))
    (tmp_path / "data.jsonl").write_text('{"input_ids": [1, 2], "labels": [1, 2]}\n' * 8)
    interpreter = python("transformers-4.53")
    subprocess.run([interpreter, "-c", MODEL], cwd=tmp_path, check=True)
    line = f"{interpreter} {launch} train.py"
    found = checked(line, tmp_path)
    assert sorted(each.code for each in found.errors) == codes and found.unchecked == []
    assert found.environment is not None and found.environment.versions["transformers"] == "4.53.3"
    ran = subprocess.run(shlex.split(line), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode != 0) == bool(codes), ran.stderr


def test_a_device_map_in_a_config(folder: Path) -> None:
    (folder / "run.yaml").write_text("output_dir: out\nmodel_init_kwargs:\n  device_map: auto\n")
    two = checked("torchrun --nproc-per-node 2 train.py --config run.yaml", folder)
    assert f"{folder}/run.yaml:3" in str(the("script-device-map", two)) and two.errors
    assert checked("python train.py --config run.yaml", folder).errors == []


# ---------------------------------------------------------------------------------------------- what is missing


def test_a_script_that_does_not_exist(folder: Path) -> None:
    found = checked("torchrun --nproc-per-node 2 tran.py", folder)
    assert the("script-not-found", found).file == str(folder / "tran.py") and found.errors


def test_a_module_that_is_not_installed(folder: Path) -> None:
    found = checked("torchrun -m nowhere.train", folder)
    assert "nowhere.train" in the("module-not-installed", found).message and found.errors
    (folder / "here.py").touch()
    assert checked("torchrun -m here", folder).errors == []


def test_a_script_that_is_not_python(folder: Path) -> None:
    (folder / "train.py").write_text("def f(:\n")
    assert the("script-not-python", checked("python train.py", folder)).file == f"{folder}/train.py:1"


def test_a_config_that_cannot_be_read(folder: Path) -> None:
    (folder / "c.yaml").write_text("a: [1\n")
    found = checked("accelerate launch --config_file c.yaml train.py", folder)
    assert the("config-unreadable", found) in found.errors


# -------------------------------------------------------------------------------------------------- the machine


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.thorough
def test_a_port_in_use_as_torchrun_fails_with_it(port: int, folder: Path) -> None:
    line = f"torchrun --nproc-per-node 2 --master-port {port} train.py"
    problem = the("guard-port-in-use", found := checked(line, folder))
    assert problem in found.errors and str(port) in problem.message
    (folder / "train.py").write_text("")
    ran = subprocess.run(
        shlex.split(f"{Path(sys.executable).parent}/{line}"), cwd=folder, capture_output=True, text=True
    )
    assert ran.returncode != 0 and "EADDRINUSE" in ran.stderr


def test_a_port_that_is_free_or_belongs_to_another_node(port: int, folder: Path) -> None:
    for options in ("--standalone", "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port {port}"):
        found = checked(f"torchrun --nproc-per-node 2 {options.format(port=port)} train.py", folder)
        assert [each for each in found.problems if each.code == "guard-port-in-use"] == []


def with_gpus(folder: Path, count: int) -> str:
    """The PATH with an nvidia-smi that knows this many GPUs."""
    rows = "\\n".join(["NVIDIA A100-SXM4-80GB, 8.0, 81920, 550.54.15"] * count)
    program = folder / "smi/nvidia-smi"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nprintf "{rows}\\n"\n')
    program.chmod(0o755)
    return f"{program.parent}:{Path(sys.executable).parent}:/usr/bin:/bin"


def test_more_processes_than_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", with_gpus(folder, 2))
    code = "env-more-processes-than-gpus"
    assert the(code, found := checked("torchrun --nproc-per-node 4 train.py", folder)) in found.errors
    for line, variables in (
        ("torchrun --nproc-per-node 2 train.py", {}),
        ("torchrun --nproc-per-node 4 train.py", {"CUDA_VISIBLE_DEVICES": ""}),
        ("torchrun --nproc-per-node 4 train.py --use_cpu", {}),
    ):
        assert code not in [each.code for each in checked(line, folder, **variables).problems]
    assert the(code, checked("torchrun --nproc-per-node 2 train.py", folder, CUDA_VISIBLE_DEVICES="1"))


def test_the_output(folder: Path) -> None:
    (folder / "out/checkpoint-10").mkdir(parents=True)
    found = checked("python train.py", folder)
    assert the("output-has-checkpoints", found).severity == "warning" and not found.errors
    assert checked("python train.py --resume_from_checkpoint true", folder).problems == []
    (folder / "a-file").touch()
    assert the("output-below-a-file", checked("python train.py --output_dir a-file/x", folder))


@pytest.mark.parametrize("script", ["sft.py", "lora_auto.py", "trainer.py"])
def test_the_model_of_a_script(script: str, folder: Path) -> None:
    shutil.copy(FILES / script, folder / "train.py")
    command = read_command(("torchrun", "train.py"), {}, folder)
    assert resources.models_of(command) == ["model"]
    (folder / "other.py").write_text("from trl import SFTTrainer\nSFTTrainer(model=model)\n")
    assert resources.models_of(read_command(("torchrun", "other.py"), {}, folder)) == []


def test_a_disk_that_may_be_too_small_is_a_warning(folder: Path) -> None:
    (folder / "model").mkdir()
    with (folder / "model/model.safetensors").open("wb") as file:
        file.truncate(2 << 40)  # without any blocks
    found = checked("torchrun --nproc-per-node 2 train.py --model_name_or_path model", folder)
    assert the("disk-too-small-for-checkpoint", found).severity == "warning" and found.errors == []
    lora = checked("python train.py --model_name_or_path model --use_peft --lora_r 8", folder)
    assert [each.code for each in lora.problems] == ["checkpoint-damaged"]  # it has no tensors


# ------------------------------------------------------------------------------------- what must not be refused


@pytest.mark.parametrize(
    "line",
    [
        "python train.py",
        "torchrun --nproc-per-node 2 train.py --output_dir new",
        "accelerate launch --multi_gpu --num_processes 2 train.py",
        "env A=1 nohup python -u train.py",
        "bash launch.sh",
    ],
)
def test_a_plain_command_passes(line: str, folder: Path) -> None:
    (folder / "launch.sh").write_text("torchrun --nproc_per_node=2 --standalone train.py --output_dir x\n")
    found = checked(line, folder)
    assert (found.errors, found.unchecked) == ([], [])
    assert found.environment is not None and "torch" in found.environment.versions


def test_names_are_those_of_the_commands_packages(folder: Path) -> None:
    """torch_dtype and tokenizer= are gone from newer transformers: only the command's own version counts."""
    (folder / "train.py").write_text("from transformers import Trainer\nTrainer(tokenizer=1)\n")
    assert the("script-removed-keyword", checked("python train.py", folder))
    for name, text in (("transformers", "4.40.0"), ("torch", "2.2.0")):
        (folder / f"site/{name}-{text}.dist-info").mkdir(parents=True)
        (folder / f"site/{name}-{text}.dist-info/METADATA").write_text(f"Name: {name}\nVersion: {text}\n")
    assert checked("python train.py", folder, PYTHONPATH=str(folder / "site")).errors == []


def test_what_was_not_checked_is_said(folder: Path) -> None:
    assert checked("docker run image python train.py", folder).unchecked == [
        "The script was not checked: reshard does not know what `docker` starts.",
        "The installed packages were not checked: the command does not show which Python it starts.",
    ]


def test_the_checks_import_no_framework(folder: Path) -> None:
    """They precede every run; `bench/guard.py` measures how long they take."""
    code = (
        "import os, sys, pathlib\n"
        "from reshard.runs.guard.before.command_checks import check_command\n"
        "from reshard.runs.checks.command.read_command import read_command\n"
        "check_command(read_command(sys.argv[1:], dict(os.environ), pathlib.Path.cwd()))\n"
        "print([name for name in ('numpy', 'torch', 'transformers') if name in sys.modules])"
    )
    words = [sys.executable, "-c", code, "torchrun", "--nproc-per-node", "2", "train.py"]
    assert subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True).stdout == "[]\n"
