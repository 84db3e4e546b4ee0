"""torchtitan's checkpoints are read: its own adapter for Hugging Face and the logits of its models are the judges."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Llama4Config, Llama4ForConditionalGeneration, Llama4TextConfig

import reshard
from reshard.base.errors import ReshardError
from reshard.oracle.transformers import transformers_logits
from tests.environments import python
from tests.genuine import make_torchtitan
from tests.genuine.make_torchtitan import SAVED as TITAN
from tests.judges import assert_agree, tensors_of
from tests.test_dcp_format import as_torch_reads, save

ROUNDED = {"qwen3_moe": 0.01, "deepseek_v3": 0.01, "gpt_oss": 0.02, "gpt_oss-older": 0.02}
"""What torchtitan computes in bfloat16: experts, and all of gpt-oss; and how much that may change."""
LEFT_OUT = {
    "deepseek_v3": r".*\.(embed_tokens|shared_head\.head)\.weight",  # copies for multi-token prediction
    "gpt_oss": r".*\.mlp\.experts\..*",
    "gpt_oss-older": r".*\.mlp\.experts\.(gate_up|down)_proj",
    "llama4-older": r".*\.feed_forward\.(gate|up|down)_proj\.weight",
}
"""What torchtitan's adapter leaves out, or names as if it were quantized."""


@pytest.mark.parametrize("name", make_torchtitan.VARIANTS)
def test_torchtitan_becomes_what_its_own_adapter_and_its_model_compute(name: str, tmp_path: Path) -> None:
    """Bit for bit the output of torchtitan's adapter for Hugging Face, and the logits of torchtitan's model."""
    check_torchtitan(TITAN / name, tmp_path / "hf")


def check_torchtitan(source: Path, out: Path) -> None:
    """Convert, and compare with the files that torchtitan saved next to it."""
    reshard.convert(source, out, no_tokenizer=True)
    found = {name: digest(tensor) for name, tensor in tensors_of(out).items()}
    digests = json.loads((source / "digests.json").read_text())
    adapted = {name.removeprefix("language_model."): each for name, each in digests.items()}
    adapted = {name: each for name, each in adapted.items() if not name.endswith("_blocks")}
    assert {name: each for name, each in found.items() if name in adapted} == adapted
    left_out = re.compile(LEFT_OUT.get(source.name, "nothing"))
    assert all(map(left_out.fullmatch, found.keys() - adapted.keys()))
    ours, theirs = transformers_logits(out, make_torchtitan.TOKENS), np.load(source / "logits.npy")
    assert_agree(ours, theirs, ROUNDED.get(source.name, 2e-5))


def digest(tensor: Any) -> str:
    """The SHA-256 of the bytes of a tensor."""
    return sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in make_torchtitan.VARIANTS if "older" not in name])
def test_what_torchtitan_writes_now_is_read(name: str, tmp_path: Path) -> None:
    code = [python("torchtitan"), "-m", "tests.genuine.make_torchtitan", str(tmp_path), name]
    subprocess.run(code, check=True, cwd=Path(__file__).parents[1])
    check_torchtitan(tmp_path / name, tmp_path / "hf")


def test_what_torchtitan_does_not_train_of_llama4_is_that_of_the_base(tmp_path: Path) -> None:
    """The vision tower and the projector."""
    text = Llama4TextConfig(**json.loads((TITAN / "llama4-older" / "config.json").read_text()))
    tower = {"hidden_size": 16, "intermediate_size": 64, "image_size": 28, "vision_output_dim": 16}
    projector = {"projector_input_dim": 16, "projector_output_dim": 16}
    vision = {**tower, **projector, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Llama4Config(text_config=text.to_dict(), vision_config=vision)
    Llama4ForConditionalGeneration(config).save_pretrained(tmp_path / "base")
    source = TITAN / "llama4-older" / "checkpoint"
    reshard.convert(source, tmp_path / "hf", base=tmp_path / "base", no_tokenizer=True)
    base, found = tensors_of(tmp_path / "base"), tensors_of(tmp_path / "hf")
    assert found.keys() == base.keys()
    own = {name: digest(each) for name, each in found.items() if name.startswith("language_model.")}
    digests = json.loads((TITAN / "llama4-older" / "digests.json").read_text())
    assert own.items() >= digests.items()
    assert all(torch.equal(found[name], base[name]) for name in found.keys() - own.keys())


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_biases_of_routers_without_a_place_on_the_hub_must_be_zeros(value: float, tmp_path: Path) -> None:
    """torchtitan's model for DeepSeek-V3 also trains DeepSeek-V2, which has none on the Hub."""
    state = as_torch_reads(TITAN / "deepseek_v3-older" / "checkpoint" / "step-1")
    state["layers.1.moe.expert_bias"].fill_(value)
    save(state, tmp_path / "dcp")
    config = json.loads((TITAN / "deepseek_v3-older" / "config.json").read_text())
    config |= {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "topk_method": "greedy",
    }
    config |= {"scoring_func": "softmax", "norm_topk_prob": False}
    (tmp_path / "dcp" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ReshardError, match="trained with them") if value else nullcontext():
        reshard.convert(tmp_path / "dcp", tmp_path / "hf", no_tokenizer=True)
    assert (tmp_path / "hf").exists() == (not value)


def test_torchtitan_of_2024_nests_the_model(tmp_path: Path) -> None:
    state = as_torch_reads(TITAN / "llama-older" / "checkpoint" / "step-1")
    save({"model": state}, tmp_path / "nested")
    save({f"model.{name}": tensor for name, tensor in state.items()}, tmp_path / "flat")
    plain = reshard.open(TITAN / "llama-older").tensors
    for folder in ("nested", "flat"):
        checkpoint = reshard.open(tmp_path / folder).checkpoint
        assert checkpoint.dialect.name == "torchtitan" and checkpoint.tensors.keys() == plain.keys()


def test_torchtitan_without_a_config_asks_for_the_base(tmp_path: Path) -> None:
    shutil.copytree(TITAN / "llama" / "checkpoint", tmp_path / "checkpoint")
    with pytest.raises(ReshardError, match="--base"):
        reshard.convert(tmp_path / "checkpoint", tmp_path / "hf", no_tokenizer=True)
    reshard.convert(tmp_path / "checkpoint", tmp_path / "hf", base=TITAN / "llama", no_tokenizer=True)


def test_a_head_that_is_not_the_embedding_is_not_dropped(tmp_path: Path) -> None:
    """The config says that the head is tied, but torchtitan trained a separate one."""
    state = as_torch_reads(TITAN / "qwen3" / "checkpoint" / "step-1")
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    save(state, tmp_path / "dcp")
    with pytest.raises(ReshardError, match=r"is unknown(?s:.*)lm_head.weight"):
        reshard.convert(tmp_path / "dcp", tmp_path / "hf", base=TITAN / "qwen3", no_tokenizer=True)
