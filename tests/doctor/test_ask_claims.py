"""Statements of a model that contradict what it was sent, the tables of releases, arithmetic, or reshard's commands."""

from __future__ import annotations

import time

import pytest

from reshard.cli.asking import parses
from reshard.diagnosis.ask.false_claims import Claims

SENT = """\
FACTS
versions: [{package: transformers, version: 4.46.0}]
LOG train.log
118: tp 8 heads 28 hidden 3584
119: size mismatch: torch.Size([32064, 4096]) from checkpoint, the current model is torch.Size([32000, 4096])
120: RuntimeError: CUDA error: device-side assert triggered
130:   File "train.py", line 42, in <module>
131: TypeError: __init__() got an unexpected keyword argument 'evaluation_strategy'"""
VERSIONS = {"transformers": "4.46.0", "torch": "2.5.1"}

TRUE = """\
line 120: "RuntimeError: CUDA error: device-side assert triggered"
Line 120: `CUDA error … triggered` is the root.
lines 119-120 and line 118 show it
see line 42 of train.py
line 42: `File "train.py"`
The log says "device-side assert".
The traceback shows `evaluation_strategy`
第 120 行："device-side assert"
28 is not divisible by 8.
28 attention heads cannot be evenly divided by 8.
28 heads aren't divisible by tensor parallel size 8
28 is a multiple of 7.
28 不能被 8 整除。
28 除不尽，能被 4 整除。
3584 / 4 = 896, and 896 / 4 = 224
3584 / 28 = 128.
28 % 8 = 4 and 28 // 8 = 3 and 28 / 8 = 3.5
28 / 8 ≈ 3.6
3,584 * 28 = 100352
32064 - 32000 = 64
28 heads / 4 ranks = 7
32000 x 4096 = 131072000
80 GiB / 3 = 27 GiB
[32000, 4096] vs [32064, 4096]
batch of (4, 2048) tokens
Qwen2.5-7B has 28 layers, tp 8, on 2024-05-01 = a day
Run `reshard doctor x.log --lang en | less`
Run `reshard convert SRC DST --to FORMAT`
`reshard` has `reshard.convert`
`TrainingArguments(eval_strategy="no")` works
You passed `TrainingArguments(evaluation_strategy="no")`.
`evaluation_strategy` was removed from `TrainingArguments` in transformers 4.51
`eval_strategy` was added to `TrainingArguments` in transformers 4.41.
`processing_class` was introduced in `Trainer` by transformers 4.46.
transformers 5.0 no longer accepts `tokenizer` in `Trainer`.
transformers 4.46 has `AutoModelForCausalLM`
`transformers.AutoModelForCausalLM` exists in transformers 4.46
You have transformers 4.46 installed
`SFTConfig` was added in trl 0.9
`DataLoader(ds, batch_size=2)` and `torch.load(path, weights_only=False)`
In torch 2.6, the default of `weights_only` changed: 7B parameters x 2 bytes = 14 GB, 8 x 80 GB = 640 GB
`AutoModel.from_pretrained(path, torch_dtype=torch.bfloat16)`; `SFTConfig(packing=True)`, `pip install trl==0.9.6`
Use `from transformers import AutoModel`
Replace `TrainingArguments(no_such=1)` with nothing.
`SomethingUnknown` was added in transformers 4.46
something was removed in transformers 9.9"""

FALSE = """\
line: line 120: "ValueError: wrong"
line: line 777: "RuntimeError"
line: Line 118: `device-side assert`
line: The log says "out of memory on rank 3".
line: 日志显示 "显存不足了"
line: 第 999 行说明了原因
number: 28 is divisible by 8.
number: 28 attention heads are divisible by the tensor parallel size 8
number: 28 is not a multiple of 7
number: 28 能被 8 整除。
number: 28 is divisible by 0.
number: 30 is not divisible by 8.
number: 3584 / 4 = 897
number: 5555 / 5 = 1111
number: 32064 - 32000 = 60
number: 28 / 0 = 3
number: 28 / 8 ≈ 5
number: The shapes are [32000, 4096] and [32128, 4096].
number: a weight of 32000x5120
command: Run `reshard convert --bogus x`
command: Run `reshard repair ckpt`
command: `reshard convert a b --to nonsense`
command: $ reshard doctor --fix
release: Use `TrainingArguments(foo_bar=1)`.
release: Use `SFTConfig(no_such_argument=3)` of trl.
release: With transformers 4.57, set `TrainingArguments(evaluation_strategy="no")`.
release: `eval_strategy` was added to `TrainingArguments` in transformers 4.50.
release: `evaluation_strategy` was removed from `TrainingArguments` in transformers 4.40
release: `AutoModelForCausalLM` was removed in transformers 4.46
release: transformers 4.46 removed `AutoModelForCausalLM`
release: transformers 4.46 does not have `AutoModelForCausalLM`
release: transformers 4.46 no longer accepts `tokenizer` in `Trainer`.
release: You have transformers 4.50 installed
release: the log shows torch 2.6
release: Use `from trl import NoSuchTrainer`
release: Call `trl.NoSuchTrainer()` instead.
release: 在 transformers 4.46 中移除了 `AutoModelForCausalLM`"""


def check(text: str) -> tuple[str, dict[str, int]]:
    left, removed = Claims(SENT, VERSIONS, parses).checked(text)
    return left, dict(removed)


@pytest.mark.parametrize("statement", TRUE.split("\n"))
def test_what_may_be_true_stays(statement: str) -> None:
    assert check(statement) == (statement, {})


@pytest.mark.parametrize("case", FALSE.split("\n"))
def test_what_is_false_is_removed(case: str) -> None:
    kind, statement = case.split(": ", 1)
    assert check(statement) == ("", {kind: 1})


def test_only_the_false_sentence_of_a_line_goes() -> None:
    text = "Cause: heads. 28 is divisible by 8. Use fewer ranks.\n\n- 28 is divisible by 8.\n1. Keep this"
    assert check(text) == ("Cause: heads. Use fewer ranks.\n\n1. Keep this", {"number": 2})


def test_a_line_of_code_is_a_statement() -> None:
    text = "```python\nfrom trl import NoSuchTrainer\nfrom trl import SFTConfig\n```\n```\nreshard fix a\n```"
    left, removed = check(text)
    assert removed == {"release": 1, "command": 1}
    assert left == "```python\nfrom trl import SFTConfig\n```\n```\n```"


def test_a_result_may_be_used_further() -> None:
    assert check("3584 / 7 = 512. The head is [512, 28].")[1] == {}
    assert check("The head is [768, 28]. 3584 / 7 = 512.")[1] == {"number": 1}


@pytest.mark.thorough
def test_any_text_is_checked_in_little_time() -> None:
    begin = time.process_time()
    for unit in (
        "`a` ",
        "28 is ",
        "28 / ",
        "transformers 4.46 has ",
        "f(a=1) ",
        "line 1 ",
        "[1, ",
        "log says ",
        "\\",
        "(",
    ):
        check(unit * (6000 // len(unit)))
    assert time.process_time() - begin < 3
