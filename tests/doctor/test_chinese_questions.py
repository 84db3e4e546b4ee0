"""A question in Chinese that quotes a message: what follows the message directly hides nothing of it."""

from __future__ import annotations

import pytest

from reshard.runs.doctor.log_diagnosis import diagnose_text

QUESTIONS = {
    "You can't train a model that has been loaded with device_map='auto'，怎么解决？": "device-map-distributed",
    "bash: torchrun: 未找到命令，请问怎么解决？": "command-not-found",
    "训练到一半就显示Killed，请问怎么回事": "killed-by-signal",
    "一直 Terminated，怎么办": "killed-terminated",
    "段错误（核心已转储），怎么解决": "killed-crash",
    "segmentation fault (core dumped)，怎么解决": "killed-crash",
    "RuntimeError: [Errno 98] Address already in use怎么办": "port-in-use",
    "Loss=NaN，请问是什么原因": "loss-nan",
    "我用 trl 的 GRPOTrainer 微调，导出的 HF 模型没有分词器，加载不了": "export-without-tokenizer",
    '使用 device_map="auto" 加载模型后用 torchrun 多卡训练 LoRA，一直起不来': "device-map-distributed",
    "保存模型时混合了 DTensor 和普通 Tensor，多卡可以单卡不行": "dtensor-mixed-copy",
    "用 InternEvo 训练的模型，convert2hf 转换之后输出乱码，权重形状也不对，请问怎么办": "internlm-convert-tp",
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_message_in_a_chinese_question(question: str) -> None:
    assert diagnose_text("-", question)[0].code == QUESTIONS[question]
