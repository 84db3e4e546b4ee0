"""A GGUF file becomes a Hugging Face folder without a base: its metadata imply config.json."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import reshard
from reshard.base.errors import ReshardError
from reshard.formats.gguf.config_of_metadata import config_of
from reshard.formats.gguf.value_types import Value, ValueType
from tests.genuine.huggingface import COMMON, _random_model, make_model
from tests.genuine.model_types import make_model_type
from tests.genuine.tiny_configs import GEMMA

# What llama.cpp computes in one way, these tiny models compute in the same way.
FIXED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "gpt_oss": {"swiglu_limit": 7.0},
    "deepseek_v3": {"n_group": 2},
    "qwen2_moe": {"norm_topk_prob": False},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
}
OF_TYPES: dict[str, dict[str, Any]] = {
    "olmoe": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    "minimax_m2": {},
}
TWO_ROPES = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
    }
}
VARIANTS = ("llama", "llama_rope_scaling", "llama_tied", "mistral", "mixtral", "qwen2", "qwen3_tied", *FIXED)


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        found: torch.Tensor = model(torch.arange(24)[None]).logits
        return found


def assert_returns(source: Path, where: Path, dtype: str = "float32") -> None:
    """A model is the same after it has been a GGUF file."""
    file, back = where / "model.gguf", where / "back"
    reshard.convert(source, file, no_tokenizer=True)
    result = reshard.convert(file, back, to="huggingface", dtype=dtype, no_tokenizer=True)
    assert not [each for each in result.plan.warnings if each.code != "gguf-without-tokenizer"]
    assert reshard.verify(source, back).equal
    assert torch.equal(logits(back), logits(source))


@pytest.mark.parametrize("name", OF_TYPES)
def test_a_later_model_returns_without_its_base(name: str, tmp_path: Path) -> None:
    source = make_model_type(name, tmp_path / "source", **OF_TYPES[name])
    assert_returns(source, tmp_path, "bfloat16")


@pytest.mark.core("qwen3_tied", "gpt_oss", "deepseek_v3", "qwen2_moe")
@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_returns_without_its_base(name: str, tmp_path: Path) -> None:
    source = make_model(name, tmp_path / "source", tokenizer=False, **FIXED.get(name, {}))
    assert_returns(source, tmp_path)


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("gemma", {}),
        ("gemma2", {"query_pre_attn_scalar": GEMMA["head_dim"], "sliding_window": 6}),
        ("gemma3_text", {"query_pre_attn_scalar": GEMMA["head_dim"], "sliding_window": 6, **TWO_ROPES}),
    ],
)
def test_a_gemma_returns_without_its_base(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    """In bfloat16, as published: one is added to norms, which rounds what has more digits."""
    source = tmp_path / "source"
    _random_model(name, {**COMMON, **GEMMA, **sizes}, "bfloat16", 0).save_pretrained(source)
    assert_returns(source, tmp_path, "bfloat16")


def test_a_rope_that_the_file_does_not_determine_needs_the_base(tmp_path: Path) -> None:
    """Llama 3's constants are not in the file; others than the usual ones cannot be told from the divisors."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 50000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    source = make_model("llama", tmp_path / "source", tokenizer=False, rope_parameters=rope)
    reshard.convert(source, tmp_path / "model.gguf", no_tokenizer=True)
    with pytest.raises(ReshardError, match="--base"):
        reshard.convert(tmp_path / "model.gguf", tmp_path / "back", to="huggingface", no_tokenizer=True)
    reshard.convert(
        tmp_path / "model.gguf", tmp_path / "back", to="huggingface", base=source, no_tokenizer=True
    )
    assert torch.equal(logits(tmp_path / "back"), logits(source))


def _values(**changed: Any) -> dict[str, Value]:
    stated = {"block_count": 2, "embedding_length": 64, "attention.head_count": 4, "rope.dimension_count": 16}
    values = {f"llama.{key}": Value(ValueType.UINT32, value) for key, value in stated.items()}
    return {**values, "general.architecture": Value(ValueType.STRING, "llama"), **changed}


SHAPES = {"token_embd.weight": (32, 64), "blk.1.attn_norm.weight": (64,)}


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.pop("llama.embedding_length"),
        lambda values: values.update({"llama.block_count": Value(ValueType.UINT32, 4_000_000_000)}),
        lambda values: values.update({"llama.attention.head_count": Value(ValueType.UINT32, 0)}),
        lambda values: values.update({"llama.attention.head_count": Value(ValueType.STRING, "4")}),
        lambda values: values.update(
            {"llama.embedding_length": Value(ValueType.ARRAY, [64], ValueType.UINT32)}
        ),
        lambda values: values.update({"general.architecture": Value(ValueType.STRING, "falcon")}),
        lambda values: values.update({"llama.rope.scaling.type": Value(ValueType.STRING, "longrope")}),
    ],
)
def test_metadata_that_do_not_describe_a_model_imply_no_config(
    change: Callable[[dict[str, Value]], object],
) -> None:
    values = _values()
    assert config_of(values, SHAPES) is not None
    change(values)
    assert config_of(values, SHAPES) is None
