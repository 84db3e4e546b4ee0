"""Files, names and arguments that a run was given and cannot use; and what a notebook needs besides a cure."""

from __future__ import annotations

import re

import pytest

from tests.doctor.test_classes import SITE, first, raised

CELL = "Cell In[3], line 1\n----> 1 trainer.train()\n"
INPUTS = {
    "OSError: Can't load tokenizer for 'out/sft'. If you were trying to load it from 'https://huggingface": (
        "tokenizer-not-found",
        "cp BASE/",
    ),
    raised(
        "TypeError: LoraConfig.__init__() got an unexpected keyword argument 'enable_lora'",
        "config = config_cls(**kwargs)",
        f"{SITE}/peft/config.py",
    ): ("api-is-gone", "delete it there"),
    "TypeError: Seq2SeqTrainingArguments.init() got an unexpected keyword argument ‘evaluation_strategy’": (
        "api-is-gone",
        "eval_strategy=",
    ),
    "TypeError: Accelerator.__init__() got an unexpected keyword argument 'logging_dir'": (
        "api-is-gone",
        "project_dir=",
    ),
    "AttributeError: 'PeftModelForCausalLM' object has no attribute 'merge_and_unload'": (
        "api-came-later",
        "peft>=0.3.0",
    ),
    "AttributeError: 'FullyShardedDataParallelPlugin' object has no attribute 'activation_checkpointing'": (
        "api-came-later",
        "accelerate>=0.23.0",
    ),
    "TypeError: LoraConfig.__init__() got an unexpected keyword argument 'enable_lora'": (
        "api-is-gone",
        "adapter_config.json",
    ),
    "ValueError:\nUnrecognized model in out/a. \nShould have a `model_type` key in its config.json": (
        "hf-no-config",
        "config.json",
    ),
}


@pytest.mark.parametrize("said", INPUTS, ids=lambda said: said.split("\n")[-1][-60:])
def test_what_a_run_cannot_use(said: str) -> None:
    found = first(said)
    code, cure = INPUTS[said]
    assert found.code == code and cure in found.remedy.en
    assert found.certainty != "sure"
    assert re.search(r"[\u4e00-\u9fff]", found.remedy.zh + found.rule.zh)


def test_a_notebook_is_restarted_after_an_installation() -> None:
    said = "ImportError: Using the `Trainer` with `PyTorch` requires `accelerate>=0.20.1`: Please run `pip install`"
    assert "restart" not in first(said).remedy.en
    found = first(CELL + said)
    assert "restart the runtime" in found.remedy.en and "重启" in found.remedy.zh
    installed = first(f"{CELL}{said}\naccelerate==0.20.3")
    assert installed.remedy.en.startswith("accelerate 0.20.3 is installed and satisfies this")


def test_an_exception_named_right_after_chinese_words() -> None:
    found = first(
        "报错AttributeError: 'FullyShardedDataParallelPlugin' object has no attribute 'activation_checkpointing'"
    )
    assert found.code == "api-came-later"
