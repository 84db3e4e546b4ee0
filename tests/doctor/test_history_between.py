"""What changed of a name between two releases, for programs."""

from __future__ import annotations

import doctest
import json

import pytest

from reshard.base.errors import ReshardError
from reshard.runs.checks.history import release_diff
from reshard.runs.checks.history.release_diff import changes


def test_the_examples_are_true() -> None:
    result = doctest.testmod(release_diff)
    assert result.attempted and not result.failed


KINDS = {
    "module": ("transformers", "transformers.models.qwen3", "4.51.0", None),
    "class": ("transformers", "AdamW", None, "4.50.0"),
    "function": ("huggingface-hub", "huggingface_hub.cached_download", None, "0.26.0"),
    "method": ("peft", "PeftModel.save_pretrained", "0.1.0", None),
    "attribute": ("transformers", "Trainer.tokenizer", None, "5.0.0"),
    "parameter": ("transformers", "TrainingArguments(evaluation_strategy=…)", None, None),
    "model type": ("transformers", "qwen3", "4.51.0", None),
    "architecture": ("vllm", "Qwen3ForCausalLM", "0.8.5.post1", None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_name_is_looked_up(kind: str) -> None:
    package, name, added, removed = KINDS[kind]
    found = changes(package, name)
    assert (found["kind"], found["added"], found["removed"]) == (kind, added, removed)
    assert json.loads(json.dumps(found)) == found


def test_a_parameter_of_one_release_only_is_told_with_its_new_name() -> None:
    found = changes("transformers", "TrainingArguments", before="4.40.0", after="4.51.3")
    assert "evaluation_strategy" in found["parameters"]["removed"]
    assert found["parameters"]["renamed"]["evaluation_strategy"] == "eval_strategy"
    assert changes("transformers", "TrainingArguments(no_cuda)")["moved_to"] == "use_cpu"
    assert changes("transformers", "TrainingArguments(evaluation_strategy=…)")["renamed"] == "4.51.0"
    assert changes("transformers", "transformers.Trainer.log(start_time)")["added"] == "4.47.0"


REFUSED = {
    "history-package-unknown": (("transformer", "AdamW"), "did you mean transformers?"),
    "history-name-unknown": (("trl", "SFTTrainr"), "did you mean SFTTrainer"),
    "history-release-unknown": (("trl", "SFTTrainer", None, "0.0.1"), "from 0.0.3 on"),
}


@pytest.mark.parametrize("code", REFUSED)
def test_what_cannot_be_looked_up_is_refused_with_what_is_known(code: str) -> None:
    given, said = REFUSED[code]
    with pytest.raises(ReshardError) as caught:
        changes(*given)
    assert [problem.code for problem in caught.value.problems] == [code]
    assert said in str(caught.value) and "expected: " in str(caught.value)


def test_an_attribute_of_a_class_that_was_replaced_went_with_it() -> None:
    assert changes("vllm", "LLMEngine.model_executor")["removed"] == "0.11.0"


def test_a_version_that_is_none_is_refused() -> None:
    with pytest.raises(ReshardError, match="`before` is no release of trl"):
        changes("trl", "SFTTrainer", "new")
