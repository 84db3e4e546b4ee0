"""The model of a checkpoint if config, tokenizer and tensors contradict each other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

import reshard
from reshard.containers.safetensors import header_bytes, read_tensors
from reshard.folders.companions import find_companions
from reshard.transfer.source_files import Sources
from tests.genuine.huggingface import VOCAB_SIZE, make_model


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_an_embedding_of_the_tokenizers_size_is_taken_for_that(tmp_path: Path) -> None:
    """Megatron-LM pads the tokenizer's size; Qwen2.5's config has more rows than that."""
    model = make_model("qwen2", tmp_path / "hf")
    tokens = find_companions(Sources(), model).tokenizer.vocab_size
    assert tokens is not None
    reshard.convert(model, tmp_path / "mc", to="megatron", vocab_divisible_by=1)
    edit(tmp_path / "mc" / "config.json", vocab_size=tokens + 40)
    result = reshard.convert(tmp_path / "mc", tmp_path / "back")
    assert any(f"vocab_size: {tokens} as the tokenizer has" in note for note in result.plan.notes)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == tokens
    assert (
        read_tensors(tmp_path / "back" / "model.safetensors", Sources())["model.embed_tokens.weight"].shape[0]
        == tokens
    )


def with_tokens(source: Path, folder: Path, *tokens: str) -> Path:
    """A copy of a folder whose tokenizer has more tokens."""
    shutil.copytree(source, folder)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens(list(tokens))
    tokenizer.save_pretrained(folder)
    return folder


def test_a_tokenizer_that_the_embedding_was_not_made_for_counts_nothing(tmp_path: Path) -> None:
    """All rows are kept: the arguments count them."""
    model = make_model("qwen2", tmp_path / "model", vocab_size=VOCAB_SIZE - 27)
    reshard.convert(model, tmp_path / "mc", to="megatron", vocab_divisible_by=1)
    edit(tmp_path / "mc" / "config.json", vocab_size=VOCAB_SIZE - 30)
    reshard.convert(tmp_path / "mc", tmp_path / "back")
    table = read_tensors(tmp_path / "back" / "model.safetensors", Sources())["model.embed_tokens.weight"]
    assert table.shape[0] == VOCAB_SIZE - 27


@pytest.mark.parametrize("name", ["qwen2", "qwen2_tied"])
@pytest.mark.parametrize("to", ["megatron", "megatron-legacy"])
def test_a_row_of_a_token_is_no_padding_though_the_config_counts_fewer(
    to: str, name: str, tmp_path: Path
) -> None:
    model = make_model(name, tmp_path / "model", vocab_size=VOCAB_SIZE + 2)
    source = with_tokens(model, tmp_path / "hf", "<one>", "<two>")
    reshard.convert(source, tmp_path / "mc", to=to, tp=2)
    edit(tmp_path / "mc" / "config.json", vocab_size=VOCAB_SIZE)
    result = reshard.convert(tmp_path / "mc", tmp_path / "back")
    assert any(
        f"vocab_size: 285 as the tokenizer has, not {VOCAB_SIZE}" in note for note in result.plan.notes
    )
    assert reshard.verify(source, tmp_path / "back").equal
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == VOCAB_SIZE + 2
    reshard.convert(tmp_path / "mc", tmp_path / "other", to="megatron", pp=2)
    assert reshard.verify(source, tmp_path / "other").equal


def test_tokens_without_rows_make_no_rows(tmp_path: Path) -> None:
    """A tokenizer may have IDs without rows in the model, as in many models tuned with adapters."""
    model = make_model("qwen2", tmp_path / "model")
    source = with_tokens(model, tmp_path / "hf", "<one>", "<two>")
    reshard.convert(source, tmp_path / "mc", to="megatron", tp=2)
    result = reshard.convert(tmp_path / "mc", tmp_path / "back")
    assert not any("vocab_size" in note for note in result.plan.notes)
    assert reshard.verify(source, tmp_path / "back").equal
    table = read_tensors(tmp_path / "back" / "model.safetensors", Sources())["model.embed_tokens.weight"]
    assert table.shape[0] == VOCAB_SIZE


def test_the_tokenizer_beside_the_weights_counts_where_the_base_has_another(tmp_path: Path) -> None:
    base = make_model("qwen2", tmp_path / "base")
    model = make_model("qwen2", tmp_path / "model", vocab_size=VOCAB_SIZE + 1)
    reshard.convert(with_tokens(model, tmp_path / "hf", "<one>"), tmp_path / "mc", to="megatron")
    reshard.convert(tmp_path / "mc", tmp_path / "back", base=base)
    assert reshard.verify(model, tmp_path / "back").equal


def test_a_row_that_only_the_head_was_trained_on_is_kept(tmp_path: Path) -> None:
    """A token that ends every sample is predicted and never read."""
    model = make_model("qwen2", tmp_path / "model", vocab_size=VOCAB_SIZE + 1)
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][-1] = 0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    reshard.convert(with_tokens(model, tmp_path / "hf", "<end>"), tmp_path / "mc", to="megatron")
    edit(tmp_path / "mc" / "config.json", vocab_size=VOCAB_SIZE)
    reshard.convert(tmp_path / "mc", tmp_path / "back")
    assert reshard.verify(model, tmp_path / "back").equal


def test_another_models_vocabulary_is_still_refused(tmp_path: Path) -> None:
    model = make_model("qwen2", tmp_path / "hf")
    reshard.convert(model, tmp_path / "mc", to="megatron")
    edit(tmp_path / "mc" / "config.json", vocab_size=5000)
    with pytest.raises(reshard.ReshardError, match="vocabulary"):
        reshard.convert(tmp_path / "mc", tmp_path / "back")


def test_quantized_weights_are_refused_in_one_word(tmp_path: Path) -> None:
    model = make_model("deepseek_v3", tmp_path / "hf")
    scale = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    dtype = next(iter(read_tensors(model / "model.safetensors", Sources()).values())).dtype
    header, _ = header_bytes([(scale, dtype, (2, 2))])
    (model / "scales.safetensors").write_bytes(header + np.ones(4, np.float32).tobytes())
    weight_map = dict.fromkeys(read_tensors(model / "model.safetensors", Sources()), "model.safetensors")
    index = {"metadata": {}, "weight_map": {**weight_map, scale: "scales.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(reshard.ReshardError, match="quantized") as caught:
        reshard.convert(model, tmp_path / "mc", to="megatron")
    assert len(caught.value.problems) == 1
