"""The failures that the doctor exists for, to their end: `reshard` completes the task of the failed run.

That they fail, and what the doctor finds in log, script and checkpoint, is in `test_head.py`: with the frameworks of
their time, on a CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import reshard
from tests.commandline import reshard as command
from tests.doctor.head import runs
from tests.environments import python
from tests.genuine import make_swift
from tests.genuine.peers import make_base

SOURCE = Path(reshard.__file__).parents[1]
REWARD = """\
def reward_short(completions, **kwargs):
    return [-float(len(completion)) for completion in completions]
"""
"""The reward of `cat_mixed/train_grpo.py`, in its own file."""
SFT = (
    *("--model", "models/Qwen-14B-Chat", "--data", "texts.jsonl", "-o", "out/qwen-lora", "--lora"),
    *("--lora_r", "4", "--lora_alpha", "8", "--lora_target_modules", "q_proj", "v_proj"),
    *("--per_device_train_batch_size", "2", "--max_steps", "2", "--gradient_checkpointing", "true"),
)
"""The options that `device_map/finetune.py` passes to Trainer and PEFT."""
GRPO = (
    *("--model", "models/Qwen2.5-0.5B", "--data", "prompts.jsonl", "-o", "out/grpo"),
    *("--reward", "rewards.py:reward_short", "--per_device_train_batch_size", "2", "--num_generations", "2"),
    *("--max_completion_length", "8", "--max_steps", "1"),
)
"""The options that `cat_mixed/train_grpo.py` passes to TRL."""


def lay_data(folder: Path) -> None:
    """The data that the scripts make for themselves, as files."""
    texts = [{"text": f"What is {n} plus 1? The answer is {n + 1}."} for n in range(16)]
    prompts = [{"prompt": f"What is {n} plus 1?"} for n in range(16)]
    for name, rows in (("texts", texts), ("prompts", prompts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARD)


def typed(folder: Path, *words: str, interpreter: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder as a person would."""
    path = os.pathsep.join([str(SOURCE), str(folder)])
    own = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [interpreter, *words],
        cwd=folder,
        env={**os.environ, **own},
        text=True,
        capture_output=True,
        timeout=400,
    )


CPU = ("--use_cpu", "true", "--bf16", "false", "--report_to", "none", "--nproc", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "words", "output"),
    [("finetune", ("sft", *SFT), "out/qwen-lora"), ("grpo", ("grpo", *GRPO), "out/grpo")],
)
def test_a_recipe_trains_what_failed(run: str, words: tuple[str, ...], output: str, tmp_path: Path) -> None:
    """device_map="auto" and an old remote-code Qwen; a preloaded model that became DTensors."""
    runs.prepared(run, tmp_path)
    lay_data(tmp_path)
    done = typed(tmp_path, "-m", "reshard", "train", *words, *CPU)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / output / "final/model.safetensors").is_file()


# -------------------------------------------------------------------------------- ms-swift's checkpoint of a MoE


@pytest.mark.slow
def test_the_checkpoint_of_swift_s_qwen3_moe_is_exported_with_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ms-swift saves it if only Megatron's files are requested: a user's export finds no tokenizer."""
    run = make_swift.RUNS["qwen3_moe-megatron-only"]
    base = make_base(run, tmp_path / "base")
    made = [python("ms-swift"), "-m", "tests.genuine.make_swift", "qwen3_moe-megatron-only", str(base)]
    subprocess.run([*made, str(tmp_path / "swift")], check=True, timeout=300, cwd=SOURCE.parent)
    checkpoint = tmp_path / "swift" / f"checkpoint-{make_swift.STEP}"
    script = runs.HERE / "no_tokenizer" / "export.py"
    shutil.copy(script, tmp_path)
    failed = typed(tmp_path, "export.py", "--model", str(checkpoint))
    log = tmp_path / "export.log"
    log.write_text(runs.neutral(failed.stdout + failed.stderr, tmp_path))
    assert failed.returncode != 0
    alone = reshard.doctor(log, script)[0]
    assert (alone.code, alone.certainty) == ("export-without-tokenizer", "sure"), log.read_text()
    found = reshard.doctor(log, script, checkpoint)[0]
    assert (found.code, found.certainty) == ("checkpoint-lacks", "sure")
    assert "--base" in found.remedy.en

    done = command("convert", checkpoint, tmp_path / "hf", "--base", base)
    assert done.code == 0, done.err
    assert reshard.verify(tmp_path / "hf", base).equal
    exported = typed(tmp_path, "export.py", "--model", str(tmp_path / "hf"), "--output_dir", "again")
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "again" / "tokenizer.json").is_file()
