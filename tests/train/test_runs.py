"""Recipes that run: each method and plan against a script that is plain TRL, and runs that are ended and continued."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

import reshard
from reshard.runs.train.methods import TRAINING_METHODS
from tests.environments import python
from tests.genuine.huggingface import make_model

pytestmark = pytest.mark.slow

SOURCE = str(Path(reshard.__file__).parents[1])
"""Also for the interpreters of other environments."""
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
QLORA = """
import sys
from datasets import load_dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl import DPOConfig, DPOTrainer
model, data, output = sys.argv[1:]
DPOTrainer(
    model=model,
    args=DPOConfig(output, **{options}),
    train_dataset=load_dataset("json", data_files=data, split="train"),
    peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM"),
    quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
).train()
"""
WRAPPERS = {
    "ddp": "DistributedDataParallel",
    "fsdp2": "{}",
    "zero2": "DeepSpeedEngine",
    "zero3": "DeepSpeedEngine",
}


def run(words: list[str], **variables: str) -> str:
    """Run a command to its good end, and return what it prints."""
    usual = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": SOURCE}
    done = subprocess.run(words, env={**os.environ, **usual, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


END_AT_ONCE = "import os; os._exit(0)\n"
"""The end of a script of several CPU ranks: gloo's threads may abort an interpreter that ends by itself."""


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
    own = {**options, **({"teacher_model_name_or_path": teacher[0]} if teacher else {})}
    output = tmp_path / "out"
    reshard.train(
        method, model=tiny(), data=data[method], output=output, nproc=2, options=own, write_only=True
    )
    for each in (script, output / "train.py"):
        each.write_text(each.read_text() + END_AT_ONCE)
    run([*launch, str(script), str(tiny()), str(data[method]), str(tmp_path / "plain"), *teacher])
    run(["bash", str(output / "run.sh")])
    assert losses(output) == losses(tmp_path / "plain")
    assert weights(output / "checkpoint-4") == weights(tmp_path / "plain/checkpoint-4")
    assert weights(output / "checkpoint-4") != weights(output / "checkpoint-2")


@pytest.mark.parametrize("lora", [False, True])
def test_each_plan_trains_as_one_process_does_and_goes_on_to_the_same_bits(
    lora: bool, tiny: Callable[..., Path], data: dict[str, Path], tmp_path: Path
) -> None:
    """On CPU ranks: accelerate leaves FSDP out there unless it is made to shard, and DeepSpeed asks for its backend."""
    output = tmp_path / "one"
    usual = {"model": tiny(), "data": data["sft"], "write_only": True, "lora": lora}
    options = {**STEPS, **({"lora_dropout": 0, "learning_rate": 1e-2} if lora else {}), "bf16": False}
    whole_batch = {**options, **CPU, "per_device_train_batch_size": 8}
    reshard.train("sft", output=output, nproc=1, options=whole_batch, **usual)
    run(["bash", str(output / "run.sh")])
    for plan, wrapper in WRAPPERS.items():
        folder = tmp_path / plan
        variables = write_for_cpus(plan, folder, usual, options)
        printed = run(["bash", str(folder / "run.sh")], **variables)
        assert re.findall(r"wrapped (\w+)", printed)[0].removeprefix("FSDP") == wrapper.format(
            "PeftModelForCausalLM" if lora else "Qwen3ForCausalLM"
        )
        assert losses(folder) == pytest.approx(losses(output), rel=1e-4), plan
        expected, trained = weights(output / "final"), weights(folder / "final")
        for name, weight in load(expected).items():
            torch.testing.assert_close(load(trained)[name], weight, rtol=0, atol=1e-4)
        shutil.rmtree(folder / "checkpoint-4")
        more = reshard.train("sft", output=folder, resume=True, write_only=True)
        assert more.command[3] == str(folder / "checkpoint-2")
        run(list(more.command), **variables)
        assert weights(folder / "final") == trained, plan
        own = reshard.open(folder / "checkpoint-4", merge=lora)  # it has config and tokenizer
        assert {*own} == load(expected).keys()


def write_for_cpus(plan: str, output: Path, usual: dict[str, Any], options: dict[str, Any]) -> dict[str, str]:
    """Write a recipe for two CPU ranks. Returns the variables that it needs; it prints the class of the wrapper."""
    zero = plan.startswith("zero")
    options = {**options, **({"ddp_backend": "gloo"} if zero else {}), **(CPU if plan == "ddp" else {})}
    reshard.train("sft", output=output, nproc=2, parallel=plan, options=options, **usual)
    script, start = output / "train.py", output / "run.sh"
    shown = "print('wrapped', type(trainer.model_wrapped).__name__, flush=True)\n"
    script.write_text(script.read_text() + shown + END_AT_ONCE)
    if zero:
        place = Path(python("deepspeed")).parent
        start.write_text(re.sub(r"\nPATH=", f"\\g<0>{place}:", start.read_text()))
        return {"DS_ACCELERATOR": "cpu"}
    if plan == "fsdp2":
        text = script.read_text().replace("import reshard.guard", "import fsdp_on_cpu, reshard.guard")
        script.write_text(text)
        return {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": os.pathsep.join([str(ON_CPU), SOURCE])}
    return {}


def test_qlora_is_plain_trl_and_is_merged_into_the_stored_base(
    tiny: Callable[..., Path], data: dict[str, Path], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    options = {**STEPS, **CPU, "learning_rate": 1e-2}
    script = tmp_path / "plain.py"
    script.write_text(QLORA.format(options=options))
    interpreter = python("bitsandbytes")
    run([interpreter, str(script), str(tiny()), str(data["dpo"]), str(tmp_path / "plain")])
    output = tmp_path / "out"
    own = {**options, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    reshard.train(
        "dpo", model=tiny(), data=data["dpo"], output=output, nproc=1, lora=True, options=own, write_only=True
    )
    start = (output / "run.sh").read_text()
    (output / "run.sh").write_text(start.replace("\nPATH=", f"\nPATH={Path(interpreter).parent}:"))
    run(["bash", str(output / "run.sh")])
    assert losses(output) == losses(tmp_path / "plain")
    base = AutoModelForCausalLM.from_pretrained(tiny())
    merged = PeftModel.from_pretrained(base, str(output / "checkpoint-4")).merge_and_unload().state_dict()
    for name, weight in load(weights(output / "final")).items():
        # Of so few rows, the order of a float32 sum depends on the processor: see adapters/peft_sums.py.
        assert torch.allclose(weight, merged[name], rtol=1e-6, atol=1e-8), name


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
