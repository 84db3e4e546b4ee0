"""Recipes that run: each method and plan against a script that is plain TRL, and runs that are ended and continued."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import reshard
from reshard.runs.train.methods import TRAINING_METHODS
from tests.environments import python
from tests.genuine.huggingface import make_model

pytestmark = pytest.mark.slow

ON_CPU = Path(__file__).parents[1] / "doctor" / "reproduce" / "support"
"""The folder of `fsdp_on_cpu.py`."""
STEPS = {
    "max_steps": 4,
    "save_steps": 2,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 4,
    "report_to": "none",
}
CPU = {"use_cpu": True, "bf16": False}
PLAIN = """
import sys
from datasets import load_dataset
from trl import {name}Config, {name}Trainer
model, data, output, *teacher = sys.argv[1:]
args = {name}Config(output, **{options})
more = {{"teacher_model": teacher[0]}} if teacher else {{}}
data = load_dataset("json", data_files=data, split="train")
{name}Trainer(model=model, args=args, train_dataset=data, **more).train()
"""
WRAPPERS = {
    "ddp": "DistributedDataParallel",
    "fsdp2": "FSDPQwen3ForCausalLM",
    "zero2": "DeepSpeedEngine",
    "zero3": "DeepSpeedEngine",
}


def run(words: list[str], **variables: str) -> str:
    """Run a command to its good end, and return what it prints."""
    usual = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, env={**os.environ, **usual, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(output: Path) -> list[float]:
    state = json.loads((output / "checkpoint-4/trainer_state.json").read_text())
    return [row["loss"] for row in state["log_history"] if "loss" in row]


def weights(checkpoint: Path) -> bytes:
    return (checkpoint / "model.safetensors").read_bytes()


@pytest.mark.parametrize("method", ["kto", "reward", "distillation"])
def test_two_ranks_train_as_plain_trl_does(
    method: str, tiny: Callable[..., Path], data: dict[str, Path], tmp_path: Path
) -> None:
    name, options = TRAINING_METHODS[method].name, {**STEPS, **CPU}
    teacher: list[str] = []
    if method == "distillation":
        sizes = {"hidden_size": 96, "num_hidden_layers": 3, "dtype": "float32", "seed": 1}
        teacher = [str(make_model("qwen3", tmp_path / "teacher", **sizes))]
        options = {**options, "max_completion_length": 8}
    script = tmp_path / "plain.py"
    script.write_text(PLAIN.format(name=name, options=options))
    launch = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
    run([*launch, str(script), str(tiny()), str(data[method]), str(tmp_path / "plain"), *teacher])
    own = {**options, **({"teacher_model_name_or_path": teacher[0]} if teacher else {})}
    output = tmp_path / "out"
    reshard.train(
        method, model=tiny(), data=data[method], output=output, nproc=2, options=own, write_only=True
    )
    run(["bash", str(output / "run.sh")])
    assert losses(output) == losses(tmp_path / "plain")
    assert weights(output / "checkpoint-4") == weights(tmp_path / "plain/checkpoint-4")
    assert weights(output / "checkpoint-4") != weights(output / "checkpoint-2")


def test_each_plan_trains_as_one_process_does(
    tiny: Callable[..., Path], data: dict[str, Path], tmp_path: Path
) -> None:
    """On CPU ranks: accelerate leaves FSDP out there unless it is made to shard, and DeepSpeed asks for its backend."""
    output = tmp_path / "one"
    usual = {"model": tiny(), "data": data["sft"], "write_only": True}
    whole_batch = {**STEPS, **CPU, "per_device_train_batch_size": 8}
    reshard.train("sft", output=output, nproc=1, options=whole_batch, **usual)
    run(["bash", str(output / "run.sh")])
    expected = losses(output)
    for plan, wrapper in WRAPPERS.items():
        found, final = trained_by(plan, tmp_path / plan, usual)
        assert found == wrapper
        assert losses(tmp_path / plan) == pytest.approx(expected, rel=1e-4), plan
        for name, weight in load_file(output / "final/model.safetensors").items():
            torch.testing.assert_close(
                load_file(final / "model.safetensors")[name], weight, rtol=0, atol=1e-4
            )


def trained_by(plan: str, output: Path, usual: dict[str, Any]) -> tuple[str, Path]:
    """Run a recipe on two CPU ranks. Returns the class of the wrapped model, and the final folder."""
    zero = plan.startswith("zero")
    options = {**STEPS, "bf16": False, **({"ddp_backend": "gloo"} if zero else {})}
    options |= CPU if plan == "ddp" else {}
    reshard.train("sft", output=output, nproc=2, parallel=plan, options=options, **usual)
    script = output / "train.py"
    text = script.read_text() + "print('wrapped', type(trainer.model_wrapped).__name__, flush=True)\n"
    if plan == "fsdp2":  # the threads of gloo's second group may abort an interpreter that ends
        text = (
            text.replace("import reshard.guard", "import fsdp_on_cpu, reshard.guard")
            + "import os; os._exit(0)\n"
        )
    script.write_text(text)
    variables = {"PYTHONPATH": os.pathsep.join([str(ON_CPU), os.environ.get("PYTHONPATH", "")])}
    if zero:
        place = Path(python("deepspeed")).parent
        start = output / "run.sh"
        start.write_text(
            re.sub(r"\nPATH=\S+:", f"\nPATH={place}:{Path(sys.executable).parent}:", start.read_text())
        )
        variables |= {"DS_ACCELERATOR": "cpu"}
    elif plan == "fsdp2":
        variables |= {"ACCELERATE_USE_CPU": "true"}
    printed = run(["bash", str(output / "run.sh")], **variables)
    return re.findall(r"wrapped (\w+)", printed)[0], output / "final"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_that_was_ended_goes_on_to_the_same_bits(
    nproc: int, number: int, tiny: Callable[..., Path], data: dict[str, Path], tmp_path: Path
) -> None:
    """SIGKILL is for all processes, the others for the guard only."""
    options = {**STEPS, **CPU, "max_steps": 40}
    usual = {"model": tiny(), "data": data["sft"], "nproc": nproc, "write_only": True, "options": options}
    for name in ("whole", "ended"):
        reshard.train("sft", output=tmp_path / name, **usual)
    run(["bash", str(tmp_path / "whole/run.sh")])
    output, log = tmp_path / "ended", tmp_path / "log"
    with log.open("wb") as file:
        words = ["bash", str(output / "run.sh")]
        guard = subprocess.Popen(words, stdout=file, stderr=file, start_new_session=True)
    wait_until(lambda: (output / "checkpoint-4/trainer_state.json").exists(), guard)
    if number == signal.SIGKILL:
        os.killpg(guard.pid, number)
    else:
        guard.send_signal(number)
    status = guard.wait()
    printed = log.read_text()
    assert status == (-9 if number == signal.SIGKILL else 128 + number), printed
    wait_until(lambda: not alive(guard.pid))
    if number != signal.SIGKILL:
        step = int(re.findall(rf"stopped by {number.name} after step (\d+), which is saved", printed)[0])
        assert 4 <= step < 40 and f"the last complete checkpoint: {output}/checkpoint-{step}" in printed
    more = reshard.train("sft", output=output, resume=True, write_only=True)
    assert "--resume_from_checkpoint" in more.command
    run(list(more.command))
    assert weights(output / "checkpoint-40") == weights(tmp_path / "whole/checkpoint-40")
    assert weights(output / "final") == weights(tmp_path / "whole/final")


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until a condition is true, at most two minutes, while a process runs."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline and (process is None or process.poll() is None)
        time.sleep(0.02)


def alive(group: int) -> bool:
    """Whether a process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
