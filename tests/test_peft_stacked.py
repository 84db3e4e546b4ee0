"""LoRA on experts that the Hub stores as stacks (`target_parameters`), judged by PEFT's own merge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

import reshard
from reshard.base.errors import ReshardError
from tests.genuine import peft as genuine
from tests.genuine import quantized
from tests.genuine.model_types import TYPES, make_model_type
from tests.judges import assert_merged, assert_same_tensors, products_agree, tensors_of

Model = Callable[..., Path]
GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"]}
FFN = {
    "gpt_oss": "intermediate_size",
    "llama4": "intermediate_size",
    "qwen3_vl_moe": "moe_intermediate_size",
    "qwen3_5_moe": "moe_intermediate_size",
}
"""Families with stacks on the Hub, and the key with the width of an expert."""
SQUARE = 64
"""The width with which a stack of down projections does not show its axes, as in gpt-oss-20b: that of the model.

transformers turns the stacks of Qwen3-VL unless they have the shape that it expects, so square ones stay as they are.
"""


def make_base(name: str, width: int, hf_model: Model, out: Path) -> Path:
    if name == "gpt_oss":
        return hf_model(name, dtype="bfloat16", **{FFN[name]: width})
    text = {**TYPES[name].settings["text_config"], FFN[name]: width}
    return make_model_type(name, out, text_config=text)


def load(folder: Path, dtype: str) -> PreTrainedModel:
    auto = AutoModelForCausalLM if "gpt_oss" in folder.name else AutoModelForImageTextToText
    return auto.from_pretrained(folder, dtype=genuine.DTYPES[dtype])


def make_adapter(base: Path, out: Path, parameters: list[str], dtype: str = "float32") -> tuple[Path, Path]:
    """An adapter of experts, and the model that PEFT merges it into."""
    model = get_peft_model(load(base, dtype), LoraConfig(target_parameters=parameters, **LORA))
    genuine.randomise(model)
    model.save_pretrained(out / "adapter")
    loaded = PeftModel.from_pretrained(load(base, dtype), out / "adapter")
    loaded.merge_and_unload().save_pretrained(out / "reference")
    return out / "adapter", out / "reference"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parameters", [(GATE_UP, DOWN), (GATE_UP,), (DOWN,)])
@pytest.mark.parametrize(
    ("name", "width"),
    [(name, width) for name in FFN for width in (SQUARE, 40) if (name, width) != ("qwen3_vl_moe", SQUARE)],
)
@pytest.mark.core("gpt_oss-40-parameters1-bfloat16", "llama4-*")
def test_stacks_are_merged_as_peft_does(
    name: str, width: int, parameters: tuple[str, ...], dtype: str, hf_model: Model, tmp_path: Path
) -> None:
    base = make_base(name, width, hf_model, tmp_path / "base")
    adapter, reference = make_adapter(base, tmp_path, list(parameters), dtype)

    reshard.convert(adapter, tmp_path / "ours", base=base, merge=True, dtype=dtype)

    ours, theirs = tensors_of(tmp_path / "ours"), tensors_of(reference)
    if name == "qwen3_5_moe":  # save_pretrained writes experts one by one
        assert reshard.verify(tmp_path / "ours", reference).equal or not products_agree()
    else:  # of Qwen3-VL, it writes [outputs, inputs]
        assert_merged(
            ours, {key: each if each.shape == ours[key].shape else each.mT for key, each in theirs.items()}
        )
    before = tensors_of(base)
    changed = {
        key.rpartition(".mlp.")[2] for key in ours if not ours[key].equal(before[key].to(ours[key].dtype))
    }
    assert {key.rpartition(".feed_forward.")[2] for key in changed if "experts" in key} == {*parameters}
    assert reshard.verify(adapter, tmp_path / "ours", proof=True)


def test_pairs_of_square_stacks_lie_as_those_of_the_other_stacks(hf_model: Model, tmp_path: Path) -> None:
    """PEFT 0.21 makes other pairs for the experts of an older transformers, which have no `is_transposed`."""
    base = make_base("gpt_oss", SQUARE, hf_model, tmp_path / "base")

    def earlier() -> PreTrainedModel:
        model = load(base, "float32")
        for module in model.modules():
            if hasattr(module, "is_transposed"):
                module.is_transposed = False
        return model

    model = get_peft_model(earlier(), LoraConfig(target_parameters=[GATE_UP, DOWN], **LORA))
    genuine.randomise(model)
    model.save_pretrained(tmp_path / "adapter")
    merged = PeftModel.from_pretrained(earlier(), tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "reference")
    reshard.convert(tmp_path / "adapter", tmp_path / "ours", base=base, merge=True, dtype="float32")
    assert_merged(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "reference"))


def test_stacks_are_merged_into_quantized_and_sharded_bases_and_layouts(
    hf_model: Model, tmp_path: Path
) -> None:
    plain = make_base("gpt_oss", SQUARE, hf_model, tmp_path / "base")
    adapter, _ = make_adapter(plain, tmp_path, [GATE_UP, DOWN])
    base = quantized.mxfp4(plain, tmp_path / "mxfp4")
    reshard.convert(base, tmp_path / "bfloat16", dtype="bfloat16", to="huggingface")
    reshard.convert(tmp_path / "bfloat16", tmp_path / "megatron", to="megatron", ep=2)

    reshard.convert(adapter, tmp_path / "ours", base=tmp_path / "bfloat16", merge=True)
    reshard.convert(adapter, tmp_path / "first", base=base, merge=True)
    reshard.convert(adapter, tmp_path / "second", base=tmp_path / "megatron", merge=True)
    reshard.convert(adapter, tmp_path / "third", base=base, merge=True, to="megatron", pp=2, ep=2)

    for other in ("first", "second", "third"):
        assert reshard.verify(tmp_path / "ours", tmp_path / other).equal, other


@pytest.mark.parametrize("width", [SQUARE, 40])
@pytest.mark.parametrize("name", ["gpt_oss", "llama4"])
def test_for_peft_they_lie_as_it_has_them(name: str, width: int, hf_model: Model, tmp_path: Path) -> None:
    base = make_base(name, width, hf_model, tmp_path / "base")
    adapter, _ = make_adapter(base, tmp_path, [GATE_UP, DOWN])
    reshard.convert(adapter, tmp_path / "ours", base=base, adapter_for="peft")
    ours, theirs = (load_file(each / "adapter_model.safetensors") for each in (tmp_path / "ours", adapter))
    assert_same_tensors(ours, theirs)


def test_pairs_that_fit_no_stack_are_refused(hf_model: Model, tmp_path: Path) -> None:
    adapter, _ = make_adapter(
        make_base("gpt_oss", 40, hf_model, tmp_path / "base"), tmp_path, [GATE_UP, DOWN]
    )
    other = make_base("gpt_oss", 48, hf_model, tmp_path / "other")
    with pytest.raises(ReshardError) as caught:
        reshard.convert(adapter, tmp_path / "ours", base=other, merge=True)
    assert {problem.code for problem in caught.value.problems} == {"adapter-misfits-base"}
    assert "stacked experts" in str(caught.value)
    assert not (tmp_path / "ours").exists()
