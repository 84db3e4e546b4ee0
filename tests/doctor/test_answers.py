"""What the doctor answers to a log without an error: no failure only if the log says that its run ended well."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.runs.doctor.diagnose_targets import examine
from tests.commandline import reshard as command

STEP = "step 10 loss 1.2345"
GOOD = {
    "transformers": "{'train_runtime': 12.1, 'train_samples_per_second': 4.1, 'train_loss': 1.2, 'epoch': 1.0}\n"
    "100%|██████████| 10/10 [00:12<00:00]",
    "transformers with an evaluation": "{'train_runtime': 12.1, 'train_loss': 1.2}\n"
    "{'eval_loss': 1.3, 'eval_runtime': 2.0}",
    "LLaMA-Factory": "***** train metrics *****\n  train_runtime = 0:00:12.10\nFigure saved at: out/loss.png",
    "torchtitan": "[rank0]:[titan] 2026-01-01 10:00:00,000 - root - INFO - Training completed\n"
    "[rank0]:[titan] 2026-01-01 10:00:01,000 - root - INFO - Process group destroyed",
    "Megatron-LM": " [2026-01-01 10:00:00] iteration      500/     500 | consumed samples: 4000 | lm loss: 2.1E+00 |\n"
    "[after training is done] datetime: 2026-01-01 10:00:01",
    "the last of all steps": " iteration      500/     500 | lm loss: 2.1E+00 |\n"
    "  successfully saved checkpoint from iteration     500 to ckpt [ t 1/2, p 1/1 ]",
    "Lightning": "`Trainer.fit` stopped: `max_steps=100` reached.",
    "DeepSpeed": "[2026-01-01 10:00:00,654] [INFO] [launch.py:285:main] Process 18914 exits successfully.",
    "axolotl": "[INFO] [axolotl.train] Training completed! Saving trained model to ./outputs/out.",
    "mlx-lm": "Iter 100: Val loss 1.1\nSaved final weights to adapters/adapters.safetensors.",
    "llama.cpp": "INFO:hf-to-gguf:Model successfully exported to out.gguf",
    "mergekit": "Done!",
    "wandb": "wandb: 🚀 View run frob at: https://wandb.ai/x\nwandb: Waiting for W&B process to finish... (success).",
    "a shell": "+ exit_code=0\nexit status: 0",
    "Slurm": "12345.0  train  COMPLETED  0:0",
    "pip": "Requirement already satisfied: torch in /venv/lib/python3.11/site-packages (2.6.0)",
    "docker": "Successfully tagged trainer:latest",
    "pytest": "======= 12 passed, 1 warning in 3.41s =======",
    "Ray": "Job 'raysubmit_1' succeeded",
    "Chinese": "模型已保存到 out/final",
}
HALF = {
    "still running": f"step 9 loss 1.3\n{STEP}",
    "another training after the first": "{'train_runtime': 12.1, 'train_loss': 1.2}\n{'loss': 0.7, 'epoch': 0.1}",
    "a checkpoint on the way": " iteration 20/ 500 | lm loss: 2.1E+00 |\n"
    "  successfully saved checkpoint from iteration 20 to ckpt",
    "a checkpoint of transformers": f"{STEP}\nSaving model checkpoint to out/checkpoint-500",
    "an evaluation that was the last": f"{STEP}\n100%|██████████| 50/50 [00:12<00:00]",
    "an epoch that is not the last": "Epoch 1: 100%|██████████| 50/50 [00:12<00:00, loss=1.2]",
    "loading": "Loading checkpoint shards: 100%|██████████| 4/4 [00:07<00:00]",
    "a build": "DeepSpeed deepspeed.ops.adam.cpu_adam built successfully",
    "a promise": "The model will be saved to out/ when training is done",
    "a server": "INFO:     Uvicorn running on http://0.0.0.0:8000 (Press CTRL+C to quit)",
    "greeting": "hello",
    "a description": "从 Megatron 转回 HF 成功，但推理结果和训练时不一致",
    "a question": "合并 LoRA 之后模型一直重复输出同一句话，怎么办？",
    "an English one": "The merged model talks gibberish after fine-tuning, what is wrong?",
    "a contrast": "Training completed but the exported model answers nonsense",
}


@pytest.mark.parametrize("tool", GOOD)
def test_a_run_that_says_that_it_ended_well_has_no_failure(tool: str, tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(f"{STEP}\n{GOOD[tool]}\n", encoding="utf-8")
    assert examine(tmp_path / "run.log").answer == "no-failure"


@pytest.mark.parametrize("what", HALF)
def test_a_log_that_does_not_say_it_is_unknown(what: str, tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(f"{HALF[what]}\n", encoding="utf-8")
    seen = examine(tmp_path / "run.log")
    assert (seen.answer, [each.certainty for each in seen.findings]) == ("unknown", ["unknown"])


def test_one_rank_says_it_for_all(tmp_path: Path) -> None:
    for rank, text in enumerate((GOOD["transformers"], HALF["still running"])):
        (tmp_path / f"rank{rank}.log").write_text(text)
    assert examine(tmp_path).answer == "no-failure"
    assert examine(tmp_path / "rank1.log").answer == "unknown"


def test_a_warning_alone_is_no_evidence_of_a_good_end(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("{'loss': nan, 'epoch': 0.1}\n")
    seen = examine(tmp_path / "run.log")
    assert [each.code for each in seen.findings] == ["run-end-unknown", "loss-nan"]


def test_what_is_unknown_is_said_in_plain_words(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(f"torch==2.6.0\n$ torchrun --nproc-per-node 8 train.py\n{STEP}\n")
    english, chinese = (command("doctor", log, "--lang", each) for each in ("en", "zh"))
    assert english.code == chinese.code == 1
    assert "unknown: no error, but nothing that says" in english.out and "未知：没有报错" in chinese.out
    assert "torch 2.6.0" in english.out and "command in the log: torchrun --nproc" in english.out
    assert "possible" not in english.out and "finding" not in english.out
