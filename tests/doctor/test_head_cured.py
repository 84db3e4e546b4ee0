"""The failures that the doctor exists for, to their end: `reshard` completes the task of the failed run.

That they fail, and what the doctor finds in log, script and checkpoint, is in `test_head.py`: with the frameworks of
their time, on a CPU. Two parts of the reports cannot fail here: bfloat16 on a GPU before Ampere (V100),
and DDP's own `aten.cat` over NCCL. The check of the first before a launch is tested in
`tests/train/test_preflight_machine.py` with a described V100; the second occurs under gloo with the same message.
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
    *("--reward", "rewards:reward_short", "--per_device_train_batch_size", "2", "--num_generations", "2"),
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


def assert_trained(done: subprocess.CompletedProcess[str], output: Path) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    *_, end = (output / "metrics.jsonl").read_text().splitlines()
    assert json.loads(end)["outcome"] == "done"
    assert "✗" not in done.stdout and "is ready" in done.stdout


# --------------------------------------------------------------------- device_map="auto", an old remote-code Qwen


@pytest.mark.slow
def test_reshard_trains_the_model_that_device_map_and_its_own_code_kept_from_training(tmp_path: Path) -> None:
    runs.prepared("finetune", tmp_path)
    lay_data(tmp_path)
    words = ("-m", "reshard", "train", "sft", *SFT, "--parallel", "fsdp2", "--nproc", "2")
    done = typed(tmp_path, *words)
    assert_trained(done, tmp_path / "out/qwen-lora")
    assert (tmp_path / "out/qwen-lora/merged/model.safetensors").is_file()
    found = reshard.diagnose(tmp_path / "out/qwen-lora")
    assert [finding.code for finding in found if finding.severity == "error"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "refused"),
    [
        (("--model_init_kwargs", '{"device_map": "auto"}'), "device_map"),
        (("--trust_remote_code", "true"), "_set_gradient_checkpointing"),
    ],
)
def test_what_made_it_fail_is_refused_before_anything_starts(
    more: tuple[str, str], refused: str, tmp_path: Path
) -> None:
    runs.prepared("finetune", tmp_path)
    lay_data(tmp_path)
    done = typed(tmp_path, "-m", "reshard", "train", "sft", *SFT, "--nproc", "2", *more)
    assert done.returncode == 2 and refused in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------- GRPO under accelerate launch, aten.cat


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["", "accelerate launch"])
def test_reshard_trains_with_grpo_where_a_preloaded_model_became_dtensors(
    launcher: str, tmp_path: Path
) -> None:
    runs.prepared("grpo", tmp_path)
    lay_data(tmp_path)
    words = ["-m", "reshard", "train", "grpo", *GRPO]
    if launcher:  # the one that failed, with its own file
        words = [*runs.ACCELERATE, *words]
    else:
        words += ["--nproc", "2"]
    done = typed(tmp_path, *words)
    assert_trained(done, tmp_path / "out/grpo")


@pytest.mark.slow
def test_the_frameworks_in_which_it_failed_are_named_before_anything_starts(tmp_path: Path) -> None:
    interpreter = runs.prepared("grpo", tmp_path)
    lay_data(tmp_path)
    done = typed(tmp_path, "-m", "reshard", "train", "grpo", *GRPO, interpreter=interpreter)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert "transformers" in done.stderr and "4.51.3" in done.stderr, done.stderr


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
    alone = reshard.diagnose(log, script)[0]
    assert (alone.code, alone.certainty) == ("export-without-tokenizer", "sure"), log.read_text()
    found = reshard.diagnose(log, script, checkpoint)[0]
    assert (found.code, found.certainty) == ("checkpoint-lacks", "sure")
    assert "--base" in found.remedy.en

    done = command("convert", checkpoint, tmp_path / "hf", "--base", base)
    assert done.code == 0, done.err
    assert reshard.verify(tmp_path / "hf", base).equal
    exported = typed(tmp_path, "export.py", "--model", str(tmp_path / "hf"), "--output_dir", "again")
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "again" / "tokenizer.json").is_file()
