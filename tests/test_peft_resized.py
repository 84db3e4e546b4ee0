"""Adapters of a model whose vocabulary was resized first, judged by the model that PEFT had in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import reshard
from reshard.base.errors import ReshardError
from tests import commandline
from tests.genuine import peft as genuine
from tests.judges import assert_merged, tensors_of

Model = Callable[..., Path]
SMALL: dict[str, Any] = {"num_hidden_layers": 2}
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 6}
TRAINED: dict[str, dict[str, Any]] = {
    "neither": {"target_modules": ["q_proj"]},
    "embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "both": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "LoRA of the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "LoRA of the head": {"target_modules": ["q_proj", "lm_head"]},
    "LoRA of both": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
}
MORE, FEWER = 300, 200
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SPARED = {"LoRA of the embedding": HEAD, "LoRA of the head": EMBEDDING}
"""What PEFT does not save if it is not tied to what it saves."""


def tables_of(model: PeftModel) -> dict[str, torch.Tensor]:
    """Embedding and head that the wrapped model computes with."""
    found = {}
    for name, whole in ((EMBEDDING, model.get_input_embeddings()), (HEAD, model.get_output_embeddings())):
        module = whole.modules_to_save["default"] if hasattr(whole, "modules_to_save") else whole
        weight = getattr(module, "base_layer", module).weight
        found[name] = weight + module.get_delta_weight("default") if hasattr(module, "lora_A") else weight
    return found


@pytest.mark.parametrize("tokens", [MORE, FEWER])
@pytest.mark.parametrize("name", ["llama", "qwen2_tied"])
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.core(
    "embedding-llama-300", "both-qwen2_tied-300", "LoRA of the head-llama-300", "LoRA of both-qwen2_tied-300"
)
def test_a_resized_model_is_merged_as_it_was_trained(
    trained: str, name: str, tokens: int, hf_model: Model, tmp_path: Path
) -> None:
    base = hf_model(name, **SMALL)
    model = genuine.wrapped(base, tokens=tokens, **LORA, **TRAINED[trained])
    model.save_pretrained(tmp_path / "adapter")

    plan = reshard.convert(tmp_path / "adapter", tmp_path / "ours", base=base, merge=True).plan

    ours, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    assert ours.config.vocab_size == tokens
    spared = SPARED.get(trained) if name == "llama" and tokens == MORE else None
    notes = [note for note in plan.notes if "PEFT did not save" in note]
    assert len(notes) == bool(spared) and all(f"more rows in {spared}" in note for note in notes)
    found = tensors_of(tmp_path / "ours")
    for table, expected in tables_of(model).items():
        rounding = 1e-4 if table == spared else 1e-6  # transformers adds noise to the mean
        assert torch.allclose(found[table], expected, atol=rounding, rtol=0), table
    tokens_seen = torch.arange(40).reshape(2, 20) * 11 % FEWER
    with torch.no_grad():
        logits, expected = ours.eval()(tokens_seen).logits, model.eval()(tokens_seen).logits
    assert torch.allclose(logits, expected, atol=1e-2 if spared else 1e-4)
    assert reshard.verify(tmp_path / "adapter", tmp_path / "ours", proof=True)


def test_the_mean_of_a_large_table_is_rounded_once(hf_model: Model, tmp_path: Path) -> None:
    base = hf_model("llama", dtype="bfloat16", **SMALL)
    model = genuine.wrapped(base, "bfloat16", tokens=MORE, **LORA, **TRAINED["LoRA of the head"])
    model.save_pretrained(tmp_path / "adapter")
    reshard.convert(tmp_path / "adapter", tmp_path / "ours", base=base, merge=True)
    old, new = (tensors_of(folder)[EMBEDDING] for folder in (base, tmp_path / "ours"))
    assert torch.equal(new[: len(old)], old)
    assert torch.equal(new[len(old) :], old.double().mean(0).bfloat16().expand(MORE - len(old), -1))


def test_a_resized_adapter_is_carried_over_and_merged_into_a_megatron_base(
    hf_model: Model, tmp_path: Path
) -> None:
    base = hf_model("llama", **SMALL)
    model = genuine.wrapped(base, tokens=MORE, **LORA, **TRAINED["both"])
    model.save_pretrained(tmp_path / "adapter")
    reshard.convert(base, tmp_path / "base", to="megatron")

    reshard.convert(tmp_path / "adapter", tmp_path / "again")
    reshard.convert(tmp_path / "again", tmp_path / "ours", base=tmp_path / "base", merge=True)
    reshard.convert(tmp_path / "adapter", tmp_path / "other", base=base, merge=True)

    assert_merged(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "other"))
    resized = genuine.load(base)
    resized.resize_token_embeddings(MORE)
    loaded = PeftModel.from_pretrained(resized, tmp_path / "again")
    assert torch.equal(genuine.logits(loaded), genuine.logits(model))


@pytest.mark.parametrize("merge", [True, False])
def test_a_second_copy_of_a_trained_table_must_be_equal(merge: bool, hf_model: Model, tmp_path: Path) -> None:
    base, adapter = hf_model("llama", **SMALL), tmp_path / "adapter"
    genuine.wrapped(base, tokens=MORE, **LORA, **TRAINED["both"]).save_pretrained(adapter)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.lm_head.modules_to_save.weight"][-1, -1] += 1
    save_file(tensors, file, {"format": "pt"})

    with pytest.raises(ReshardError) as caught:
        reshard.convert(adapter, tmp_path / "ours", **({"base": base, "merge": True} if merge else {}))

    assert [problem.code for problem in caught.value.problems] == ["copies-differ"]
    assert "lm_head.modules_to_save.weight" in str(caught.value)
    assert not (tmp_path / "ours").exists()


def test_a_tied_head_that_the_base_stores_all_the_same_stays_equal_to_the_embedding(
    hf_model: Model, tmp_path: Path
) -> None:
    """transformers computes with the embedding and ignores the stored copy."""
    base = tmp_path / "base"
    base.mkdir()
    for file in (original := hf_model("qwen2_tied", **SMALL)).iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    tensors = tensors_of(original)
    save_file({**tensors, HEAD: tensors[EMBEDDING].clone()}, base / "model.safetensors", {"format": "pt"})
    assert json.loads((base / "config.json").read_text())["tie_word_embeddings"] is True
    model = genuine.wrapped(base, tokens=MORE, **LORA, **TRAINED["LoRA of the embedding"])
    model.save_pretrained(tmp_path / "adapter")

    done = commandline.reshard(
        "convert", tmp_path / "adapter", tmp_path / "ours", "--merge", "--base", base, "--json"
    )

    assert done.code == 0, done.err
    found = tensors_of(tmp_path / "ours")
    assert torch.equal(found[HEAD], tables_of(model)[HEAD])
