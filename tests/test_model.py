"""Which model a checkpoint holds, where config, tokenizer and tensors tell different stories."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import reshard
from reshard.formats.companions import find_companions
from reshard.formats.safetensors import header_bytes, read_tensors
from tests.genuine.huggingface import make_model


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_an_embedding_of_the_tokenizers_size_is_taken_for_that(tmp_path: Path) -> None:
    """Megatron-LM pads what the tokenizer has; Qwen2.5's config counts more rows than that."""
    model = make_model("qwen2", tmp_path / "hf")
    tokens = find_companions(model).vocab_size
    assert tokens is not None
    reshard.convert(model, tmp_path / "mc", to="megatron", vocab_divisible_by=1)
    edit(tmp_path / "mc" / "config.json", vocab_size=tokens + 40)
    result = reshard.convert(tmp_path / "mc", tmp_path / "back")
    assert any(f"vocab_size: {tokens} as the tokenizer has" in note for note in result.plan.notes)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == tokens
    assert (
        read_tensors(tmp_path / "back" / "model.safetensors")["model.embed_tokens.weight"].shape[0] == tokens
    )


def test_another_models_vocabulary_is_still_refused(tmp_path: Path) -> None:
    model = make_model("qwen2", tmp_path / "hf")
    reshard.convert(model, tmp_path / "mc", to="megatron")
    edit(tmp_path / "mc" / "config.json", vocab_size=5000)
    with pytest.raises(reshard.ReshardError, match="vocabulary"):
        reshard.convert(tmp_path / "mc", tmp_path / "back")


def test_quantized_weights_are_refused_in_one_word(tmp_path: Path) -> None:
    model = make_model("deepseek_v3", tmp_path / "hf")
    scale = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    dtype = next(iter(read_tensors(model / "model.safetensors").values())).dtype
    header, _ = header_bytes([(scale, dtype, (2, 2))])
    (model / "scales.safetensors").write_bytes(header + np.ones(4, np.float32).tobytes())
    weight_map = dict.fromkeys(read_tensors(model / "model.safetensors"), "model.safetensors")
    index = {"metadata": {}, "weight_map": {**weight_map, scale: "scales.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(reshard.ReshardError, match="quantized") as caught:
        reshard.convert(model, tmp_path / "mc", to="megatron")
    assert len(caught.value.problems) == 1
