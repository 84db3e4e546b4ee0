"""Families that transformers' own code cannot make a folder of, or that Megatron-Core does not hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard.families import FAMILIES
from reshard.layout import Layout
from reshard.oracle.transformers import transformers_logits
from tests.judges import TOKENS, assert_agree, assert_same_tensors, judged_by_megatron, tensors_of

Models = Callable[..., Path]


def as_baichuan(llama: Path, folder: Path) -> Path:
    """A Llama model whose folder says Baichuan: the same weights under the names of its remote code.

    Baichuan's code is not part of transformers and is never run here. It computes what Llama computes, from
    queries, keys and values of one projection. Source: configuration_baichuan.py and modeling_baichuan.py of
    baichuan-inc/Baichuan-7B; rotary_emb.inv_freq stands in its weights, too.
    """
    folder.mkdir()
    tensors = load_file(llama / "model.safetensors")
    for layer in range(4):
        prefix = f"model.layers.{layer}.self_attn."
        tensors[f"{prefix}W_pack.weight"] = torch.cat(
            [tensors.pop(f"{prefix}{name}_proj.weight") for name in "qkv"]
        )
        tensors[f"{prefix}rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((llama / "config.json").read_text())
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    said = {key: config[key] for key in (*kept, "max_position_embeddings", "rms_norm_eps", "hidden_act")}
    said |= {"model_type": "baichuan", "architectures": ["BaiChuanForCausalLM"], "torch_dtype": "float32"}
    said |= {"auto_map": {"AutoModelForCausalLM": "modeling_baichuan.BaiChuanForCausalLM"}}
    (folder / "config.json").write_text(json.dumps({**said, "tie_word_embeddings": False}))
    (folder / "tokenizer.json").write_bytes((llama / "tokenizer.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def baichuan(hf_model: Models, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of Baichuan, and the folder of the Llama model that computes the same."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    llama = hf_model("llama", head_dim=8, num_key_value_heads=8, rope_parameters=rope)
    return as_baichuan(llama, tmp_path_factory.mktemp("hub") / "baichuan"), llama


@pytest.mark.parametrize("to", ["megatron", "megatron-legacy"])
def test_megatron_computes_with_the_packed_projections_of_baichuan(
    to: str, baichuan: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, llama = baichuan
    expected = transformers_logits(llama, TOKENS)
    wanted = {name: t for name, t in tensors_of(folder).items() if not name.endswith("inv_freq")}
    for layout in (Layout(tp=2, pp=2), Layout(pp=2, vpp=2)):
        there, back = tmp_path / f"{layout}", tmp_path / f"{layout} back"
        reshard.convert(folder, there, to=to, **layout.as_dict())
        assert_agree(judged_by_megatron(there).logits, expected)
        reshard.convert(there, back)
        assert_same_tensors(tensors_of(back), wanted)


def test_baichuan_models_that_compute_otherwise_are_named() -> None:
    notices = FAMILIES["baichuan"].config.notices
    small = {"max_position_embeddings": 4096, "model_max_length": 4096}
    assert notices(small) == []
    [warning] = notices({"model_max_length": 4096})
    assert "ALiBi" in warning.message
    [warning] = notices({**small, "z_loss_weight": 0})
    assert "normalises the rows of its head" in warning.message
