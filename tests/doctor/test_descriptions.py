"""A person's sentence about a run, without a line of its log, is answered: with what it may be, or what to paste."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.runs.doctor.log_diagnosis import diagnose_text
from tests.commandline import reshard as command

QUESTIONS = {
    "用 InternEvo 训练的模型，convert2hf 转换之后输出乱码，权重形状也不对，请问怎么办": "internlm-convert-tp",
    "我用 trl 的 GRPOTrainer 微调，导出的 HF 模型没有分词器，加载不了": "export-without-tokenizer",
    '使用 device_map="auto" 加载模型后用 torchrun 多卡训练 LoRA，一直起不来': "device-map-distributed",
    "保存模型时混合了 DTensor 和普通 Tensor，多卡可以单卡不行": "dtensor-mixed-copy",
    "My exported model has no tokenizer, why?": "export-without-tokenizer",
    "The merged model talks gibberish after fine-tuning, what is wrong?": "description-only",
    "微调之后模型效果不对，怎么办？": "description-only",
    "load_state_dict raises for a model with tied weights": "description-only",
    "It crashes.": "description-only",
    "loss 0 from the first step": "description-only",
    "at step 100 the loss explodes": "description-only",
    "合并 LoRA 之后模型一直重复输出同一句话": "description-only",
    "从 Megatron 转回 HF 成功，但推理结果和训练时不一致": "description-only",
    "为什么 loss: 0.0 一直不变？": "description-only",
    "hello": "description-only",
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_description_is_answered(question: str) -> None:
    (found,) = diagnose_text("question.txt", question)
    assert (found.code, found.certainty) == (QUESTIONS[question], "possible")


REPORTS = {
    "[BUG] Qwen3 MoE 30B-A3B training stuck\nScript to reproduce:\n"
    "deepspeed --module openrlhf.cli.train_sft --zero_stage 3 \\\n  --bf16\n": "zero3-experts-hang",
    "[Bug] weights are dropped\nA model that was saved twice loads with most weights silently left out. The log says\n"
    "The server is fired up and ready to roll!\n": "description-only",
    "Bug: torch.compile leaves its prefix in keys\n- saved: _orig_mod.layers.0.weight\n"
    "- 163 missing keys\n": "hf-wrapper-prefix",
    "Missing tensors error although all files are there\nRunning it gives\nmissing tensor: lm_head.weight\n"
    "ls *.safetensors | wc -l\n141\n": "description-only",
    "用 ZeRO-3 全参微调，保存的模型只有 2 GB。\n环境：单机 8 卡\n步骤：\n1. 训练 500 步\n2. 保存检查点\n3. 合并权重\n"
    "大小应该是 140 GB。\n": "description-only",
    "step 1 loss: 2.3\nfrob\n请问这个报错怎么解决？\n": "description-only",
}


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_with_a_title_is_answered(report: str) -> None:
    (found,) = diagnose_text("report.txt", report)
    assert (found.code, found.certainty) == (REPORTS[report], "possible")


def test_a_question_is_not_the_failure_that_it_asks_about() -> None:
    """An error that a program printed stays the first failure, without the question below it."""
    (found,) = diagnose_text("log", "building\nERROR: Failed building wheel for frob\n请问这个报错怎么解决？")
    assert found.places[0].line == 2 and "请问" not in found.rule.en


@pytest.mark.parametrize(
    "text", ["epoch 1 done, no problems", "Training finished.\nSaved to out/.", "模型转换完成"]
)
def test_other_sentences_are_no_failure(text: str) -> None:
    assert diagnose_text("log", text) == []


def test_the_exit_status_tells_of_the_failure(tmp_path: Path) -> None:
    (tmp_path / "question.txt").write_text("导出的 HF 模型没有分词器，加载不了\n")
    done = command("doctor", tmp_path / "question.txt")
    assert done.code == 1
