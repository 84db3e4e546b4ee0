"""Adapters of classifiers and reward models, whose head PEFT saves with them, judged by PEFT and transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

import reshard
from reshard.base.errors import ReshardError
from tests.genuine.peft import randomise
from tests.judges import assert_merged, tensors_of

Model = Callable[..., Path]
CLASSES = {"SEQ_CLS": "AutoModelForSequenceClassification", "TOKEN_CLS": "AutoModelForTokenClassification"}


def make(base: Path, out: Path, task: str, labels: int) -> Path:
    """An adapter with a trained head, and what PEFT merges it into."""
    auto = getattr(transformers, CLASSES[task])

    def load() -> Any:
        return auto.from_pretrained(base, num_labels=labels, dtype=torch.float32)

    lora = LoraConfig(task_type=task, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(load(), lora)
    randomise(model)
    model.save_pretrained(out / "adapter")
    PeftModel.from_pretrained(load(), out / "adapter").merge_and_unload().save_pretrained(out / "reference")
    return out / "adapter"


@pytest.mark.parametrize(
    ("name", "task", "labels"),
    [
        ("llama", "SEQ_CLS", 1),
        ("llama", "SEQ_CLS", 5),
        ("qwen3_tied", "SEQ_CLS", 2),
        ("qwen3_moe", "TOKEN_CLS", 3),
    ],
)
@pytest.mark.core("llama-SEQ_CLS-5", "qwen3_moe-TOKEN_CLS-3")
def test_the_head_is_merged_and_transformers_loads_it(
    name: str, task: str, labels: int, hf_model: Model, tmp_path: Path
) -> None:
    base = hf_model(name, dtype="float32")
    adapter = make(base, tmp_path, task, labels)
    reshard.convert(adapter, tmp_path / "ours", base=base, merge=True)
    assert_merged(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "reference"))
    assert reshard.verify(adapter, tmp_path / "ours", proof=True)

    auto = getattr(transformers, CLASSES[task])
    loaded, info = auto.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    ours, theirs = (
        json.loads((tmp_path / each / "config.json").read_text()) for each in ("ours", "reference")
    )
    assert ours["architectures"] == theirs["architectures"] == [type(loaded).__name__]
    assert loaded.config.num_labels == labels


def test_a_base_that_is_a_classifier_keeps_the_names_of_its_labels(hf_model: Model, tmp_path: Path) -> None:
    labels = {0: "bad", 1: "good"}
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        hf_model("llama", dtype="float32"), id2label=labels, label2id={"bad": 0, "good": 1}
    )
    model.save_pretrained(tmp_path / "base")
    adapter = make(tmp_path / "base", tmp_path, "SEQ_CLS", 2)
    reshard.convert(adapter, tmp_path / "ours", base=tmp_path / "base", merge=True, no_tokenizer=True)
    assert_merged(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "reference"))
    assert transformers.AutoConfig.from_pretrained(tmp_path / "ours").id2label == labels


def test_engines_of_language_models_refuse_it(hf_model: Model, tmp_path: Path) -> None:
    base = hf_model("llama", dtype="float32")
    adapter = make(base, tmp_path, "SEQ_CLS", 1)
    for options, code in (
        ({"to": "megatron", "merge": True}, "engine-without-head"),
        ({"adapter_for": "vllm"}, "adapter-engine-unable"),
    ):
        with pytest.raises(ReshardError) as caught:
            reshard.convert(adapter, tmp_path / "ours", base=base, **options)
        assert {each.code for each in caught.value.problems} == {code}


def test_a_head_of_an_unknown_kind_is_refused_for_what_it_is(hf_model: Model, tmp_path: Path) -> None:
    base = hf_model("llama", dtype="float32")
    adapter = make(base, tmp_path, "SEQ_CLS", 1)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "task_type": None}))
    with pytest.raises(ReshardError, match=r"score\.weight") as caught:
        reshard.convert(adapter, tmp_path / "ours", base=base, merge=True)
    assert {each.code for each in caught.value.problems} == {"adapter-head-unsupported"}
