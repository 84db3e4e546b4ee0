"""Classifiers, reward models and embedding models: their layers are checked as those of a language model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import reshard
from reshard.base.errors import ReshardError
from tests.judges import assert_same_tensors, tensors_of

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
KINDS = {
    "Qwen3ForSequenceClassification": "Qwen3Config",
    "LlamaForSequenceClassification": "LlamaConfig",
    "Qwen2ForTokenClassification": "Qwen2Config",
    "LlamaForQuestionAnswering": "LlamaConfig",
    "Qwen2Model": "Qwen2Config",
    "MistralModel": "MistralConfig",
}


@pytest.fixture(params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return model(request.param, tmp_path / request.param)


def model(name: str, folder: Path) -> Path:
    config = getattr(transformers, KINDS[name])(**SIZES, **HEADS)
    getattr(transformers, name)(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def converted(source: Path, out: Path, to: str = "huggingface", **options: Any) -> Path:
    reshard.convert(source, out, to=to, no_tokenizer=True, **options)
    return out


def codes(source: Path, to: str, out: Path) -> list[str]:
    with pytest.raises(ReshardError) as refused:
        converted(source, out, to=to)
    assert not out.exists()
    assert [each.code for each in reshard.inspect(source).problems[: len(refused.value.problems)]] == [
        each.code for each in refused.value.problems
    ]
    return [each.code for each in refused.value.problems]


def test_it_is_copied_and_transformers_loads_it(saved: Path, tmp_path: Path) -> None:
    out = converted(converted(saved, tmp_path / "dcp", to="dcp"), tmp_path / "out", to="huggingface")
    assert_same_tensors(tensors_of(out), tensors_of(saved))
    assert reshard.verify(saved, out)
    loaded, info = getattr(transformers, saved.name).from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert loaded.dtype == torch.bfloat16


DAMAGE: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "weights-fewer-than-config": lambda tensors: [
        tensors.pop(name) for name in list(tensors) if "layers.1." in name
    ],
    "tensor-missing": lambda tensors: tensors.pop(next(name for name in tensors if "0.mlp.up_proj" in name)),
    "tensor-transposed": lambda tensors: [
        tensors.update({name: tensor.T.contiguous()})
        for name, tensor in list(tensors.items())
        if "up_proj" in name
    ],
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["Qwen3ForSequenceClassification", "Qwen2Model"])
def test_what_is_damaged_is_refused(name: str, damage: str, tmp_path: Path) -> None:
    source = model(name, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    DAMAGE[damage](tensors)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    for to in ("huggingface", "dcp"):
        assert len(codes(source, to, tmp_path / "out")) == 1
    with pytest.raises(ReshardError) as refused:
        converted(source, tmp_path / "out")
    (problem,) = refused.value.problems
    assert problem.code == damage
    assert name != "Qwen2Model" or "model." not in str(problem.tensor), "the name in the file"


def test_a_head_that_is_missing_is_refused(tmp_path: Path) -> None:
    source = model("LlamaForSequenceClassification", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert codes(source, "huggingface", tmp_path / "out") == ["head-missing"]


def test_an_embedding_model_may_name_the_language_model(tmp_path: Path) -> None:
    """transformers loads names without `model.` into a language model whose head is tied."""
    source = model("Qwen2Model", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config |= {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    out = converted(source, tmp_path / "out")
    assert_same_tensors(tensors_of(out), tensors_of(source))


def test_an_engine_has_no_such_head(saved: Path, tmp_path: Path) -> None:
    assert saved.name in " ".join(refused_by_engine(saved, tmp_path / "out").split())


def test_names_without_a_head_are_told_from_the_class_of_one(tmp_path: Path) -> None:
    """Embedding models are published under the class of their language model."""
    source = model("Qwen2Model", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2ForCausalLM"]}))
    told = " ".join(refused_by_engine(source, tmp_path / "out").split())
    assert "expected: Qwen2ForCausalLM" in told and "found: names without an output head" in told


def refused_by_engine(source: Path, out: Path) -> str:
    with pytest.raises(ReshardError) as refused:
        converted(source, out, to="megatron")
    assert [each.code for each in refused.value.problems] == ["engine-without-head"] and not out.exists()
    return str(refused.value)


@pytest.mark.parametrize("prefix", ["module.", "_forward_module.", "policy."])
def test_a_prefix_of_all_names_is_named_with_its_cure(prefix: str, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES, **HEADS)
    source = tmp_path / "source"
    transformers.LlamaForCausalLM(config).save_pretrained(source)
    whole = load_file(source / "model.safetensors")
    shutil.copytree(source, tmp_path / "wrapped")
    wrapped = {f"{prefix}{name}": tensor for name, tensor in whole.items()}
    save_file(wrapped, tmp_path / "wrapped" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ReshardError, match=f"--strip {prefix}") as refused:
        converted(tmp_path / "wrapped", tmp_path / "out")
    assert [each.code for each in refused.value.problems] == ["wrapper-in-names"]
    out = converted(tmp_path / "wrapped", tmp_path / "out", strip=(prefix,))
    assert_same_tensors(tensors_of(out), whole)
