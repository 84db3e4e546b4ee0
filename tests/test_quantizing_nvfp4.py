"""Writing NVFP4: the bytes of llm-compressor and compressed-tensors, loadable where theirs are."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

import reshard
from reshard.algebra.dtypes import dtype
from reshard.algebra.tensors import Tensor
from reshard.base.errors import ReshardError
from reshard.formats.module_quantization import QuantizationSettings
from reshard.model.compressed_settings import settings_of
from reshard.model.quantizer import STORAGES, name_in_layer
from reshard.transfer.gather import Gatherer
from reshard.transfer.plan import Planned
from reshard.transfer.thread_files import OpenFiles
from tests.environments import python
from tests.genuine import quantized
from tests.judges import assert_same_tensors, tensors_of

Models = Callable[..., Path]
Tensors = dict[str, torch.Tensor]
PARTS = ("_packed", "_scale", "_global_scale")


def assert_same_bytes(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        np.testing.assert_array_equal(quantized.bits(found[name]), quantized.bits(tensor), err_msg=name)


# ------------------------------------------------------------------------------------------------ the packages


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "qwen3_tied"])
def test_nvfp4_is_what_llm_compressor_writes(name: str, hf_model: Models, tmp_path: Path) -> None:
    plain, theirs, out = hf_model(name, dtype="bfloat16"), tmp_path / "theirs", tmp_path / "out"
    make = [python("llm-compressor"), "-m", "tests.genuine.make_nvfp4", "NVFP4A16"]
    subprocess.run([*make, plain, theirs, tmp_path / "expected.safetensors"], check=True)
    reshard.convert(plain, out, quantize="nvfp4", max_shard_size="50kB")
    assert_same_bytes(tensors_of(out), tensors_of(theirs))
    load = [python("quantizers"), "-m", "tests.genuine.make_quantized", "plain"]
    for folder in (out, theirs):  # as transformers loads it
        subprocess.run([*load, folder, tmp_path / f"{folder.name}.safetensors"], check=True)
    assert_same_bytes(load_file(tmp_path / "out.safetensors"), load_file(tmp_path / "theirs.safetensors"))
    reshard.convert(out, tmp_path / "plain", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "plain", load_file(tmp_path / "expected.safetensors"))


@pytest.mark.slow
def test_a_model_with_a_tower(tmp_path: Path) -> None:
    """Its tower stays plain, and transformers loads the rest with compressed-tensors."""
    text = {
        "vocab_size": 99,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    seen = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    vision = {**seen, "patch_size": 4, "deepstack_visual_indexes": [0]}
    config = Qwen3VLConfig(text_config={**text, "rope_scaling": rope}, vision_config=vision)
    model = Qwen3VLForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "source")
    reshard.convert(tmp_path / "source", tmp_path / "out", quantize="nvfp4", no_tokenizer=True)
    load = [python("quantizers"), "-m", "tests.genuine.make_quantized", "plain"]
    subprocess.run([*load, tmp_path / "out", tmp_path / "expected.safetensors"], check=True)
    reshard.convert(tmp_path / "out", tmp_path / "plain", dtype="bfloat16", no_tokenizer=True)
    found, expected = tensors_of(tmp_path / "plain"), load_file(tmp_path / "expected.safetensors")
    assert_same_bytes(found, {name: expected[name] for name in found})
    assert sum("visual" in name for name in found) > 10
    before = tensors_of(tmp_path / "source")
    changed = {name for name, tensor in before.items() if not torch.equal(found[name], tensor)}
    assert len(changed) == 14 and all(".layers." in name for name in changed)


def odd_weights() -> Tensors:
    """Weights of many sizes in three dtypes, with zeros of both signs, values between two codes, and outliers."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        for size in (1e-3, 1.0, 100.0, 1e-6, 1e-5 if kind == torch.float16 else 1e-30):
            weight = torch.randn(64, 64, generator=draw) * size
            weight[3], weight[4, :16], weight[5] = 0, 0, -0.0
            weight[6, ::2] *= 1e-6
            weight[7, 1] = weight.abs().max() * 50
            made.append(weight.to(kind))
        wide = torch.randn(64, 64, generator=draw) * torch.exp(6 * torch.randn(64, 64, generator=draw))
        made += [torch.zeros(32, 32).to(kind), wide.clamp(-6e4, 6e4).to(kind)]
        made.append((torch.randint(-12, 13, (64, 64), generator=draw) / 4).to(kind))
    return {f"model.layers.{index}.self_attn.o_proj.weight": weight for index, weight in enumerate(made)}


@pytest.mark.slow
def test_odd_weights_as_compressed_tensors_compresses_them(hf_model: Models, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    save_file(odd_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((hf_model("qwen3") / "config.json").read_bytes())
    make = [python("llm-compressor"), "-m", "tests.genuine.make_nvfp4", "compress-NVFP4A16"]
    subprocess.run([*make, folder / "model.safetensors", tmp_path / "expected.safetensors"], check=True)
    expected = load_file(tmp_path / "expected.safetensors")
    with closing(OpenFiles()) as files:
        gatherer = Gatherer(files, None)
        for name, tensor in reshard.open(folder).checkpoint.tensors.items():
            for part, role in zip(STORAGES["nvfp4"].parts(name, tensor), PARTS, strict=True):
                _assert_as(gatherer, part, expected.pop(name + role), name + role)
    assert not expected


def _assert_as(gatherer: Gatherer, part: Tensor, expected: torch.Tensor, name: str) -> None:
    """Assert that a tensor has the expected elements, read at once and in ranges."""
    assert part.shape == tuple(expected.shape)
    wanted, count = quantized.bits(expected).reshape(-1), part.view.numel
    for step in (count, 37):
        for low in range(0, count, step):
            found = gatherer.read(part, low, min(low + step, count)).view(np.uint8)
            at = low * part.dtype.itemsize
            np.testing.assert_array_equal(found, wanted[at : at + found.size], err_msg=name)


# ------------------------------------------------------------------------------------------------ from any source


@pytest.mark.core("24MiB")
@pytest.mark.parametrize("memory", [None, "24MiB"])
def test_from_megatron_and_in_little_memory(memory: str | None, hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("qwen3_moe", dtype="bfloat16")
    reshard.convert(plain, tmp_path / "native", to="megatron", tp=2, ep=2)
    plan = reshard.convert(plain, tmp_path / "one", quantize="nvfp4").plan
    limit = {"memory": memory} if memory else {}
    reshard.convert(tmp_path / "native", tmp_path / "two", quantize="nvfp4", **limit)
    found = tensors_of(tmp_path / "two")
    assert_same_bytes(found, tensors_of(tmp_path / "one"))
    chosen = [name for name in found if name.endswith("_packed")]
    assert f"{len(chosen)} weights are quantized to nvfp4" in plan.notes
    assert reshard.verify(plain, tmp_path / "one", proof=True)
    layer = "model.layers.1.self_attn"  # vLLM joins these three, and has one scale for them
    scales = [found[f"{layer}.{each}_proj.weight_global_scale"] for each in "qkv"]
    largest = max(tensors_of(plain)[f"{layer}.{each}_proj.weight"].abs().max() for each in "qkv")
    assert scales[0] == scales[1] == scales[2] == (1 / largest * 2688).float()


def test_quantized_twice_it_keeps_its_values(hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("qwen3", dtype="bfloat16")
    reshard.convert(plain, tmp_path / "one", quantize="nvfp4")
    reshard.convert(tmp_path / "one", tmp_path / "plain", dtype="bfloat16")
    first = tensors_of(tmp_path / "plain")
    reference = tensors_of(plain)
    for name, tensor in first.items():
        off = (tensor.float() - reference[name].float()).abs()
        assert off.max() <= reference[name].float().abs().max() / 6 * 1.1, name
    reshard.convert(tmp_path / "one", tmp_path / "fp8", quantize="fp8")  # by way of bfloat16
    assert (
        json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]["quant_method"]
        == "fp8"
    )


def test_other_dtypes_are_quantized_in_themselves(hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("qwen3", dtype="float32")
    reshard.convert(plain, tmp_path / "one", quantize="nvfp4")
    reshard.convert(plain, tmp_path / "two", quantize="nvfp4", dtype="bfloat16")
    reshard.convert(hf_model("qwen3", dtype="bfloat16"), tmp_path / "three", quantize="nvfp4")
    assert_same_tensors(tensors_of(tmp_path / "two"), tensors_of(tmp_path / "three"))
    scale = "model.layers.0.mlp.down_proj.weight_global_scale"
    assert tensors_of(tmp_path / "one")[scale] != tensors_of(tmp_path / "two")[scale]


def test_what_stays_plain_is_ignored_by_loaders(hf_model: Models, tmp_path: Path) -> None:
    reshard.convert(hf_model("qwen3_moe", dtype="bfloat16"), tmp_path / "out", quantize="nvfp4")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["ignore"] == ["lm_head", "re:.*embed_tokens$", r"re:.*\.mlp\.gate$"]
    assert settings["format"] == "nvfp4-pack-quantized"


def test_towers_are_ignored_whatever_is_before_their_names() -> None:
    matrix = {"dtype": dtype("bfloat16"), "shape": (16, 16), "source": lambda: None}
    kept = [
        "visual.blocks.0.attn.qkv",
        "model.visual.merger.fc",
        "model.layers.0.mlp.gate",
        "mtp.fc",
        "lm_head",
    ]
    chosen = ["model.layers.0.mlp.up_proj.weight", "mtp.layers.0.mlp.up_proj.weight"]
    others = [Planned(name=f"{name}.weight", **matrix) for name in kept]
    ignored = settings_of("nvfp4", others, chosen, name_in_layer)["ignore"]
    assert ignored == ["lm_head", r"re:.*visual\..*", r"re:.*\.mlp\.gate$", r"re:.*mtp\.fc$"]
    settings = QuantizationSettings({"quant_method": "compressed-tensors", "ignore": ignored})
    for name in (*kept, "model.visual.blocks.0.attn.qkv", "model.language_model.layers.0.mlp.gate"):
        assert settings.of(name).schemes == {"plain"}, name
    for name in chosen:
        assert not settings.of(name.removesuffix(".weight")).schemes


# ------------------------------------------------------------------------------------------------ refused


def test_rows_that_are_no_multiple_of_sixteen(hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("qwen3", dtype="bfloat16", intermediate_size=88)
    with pytest.raises(ReshardError) as raised:
        reshard.convert(plain, tmp_path / "out", quantize="nvfp4")
    (problem,) = raised.value.problems
    assert problem.code == "weight-not-divisible-into-blocks"
    assert str(problem.tensor).startswith("model.layers.0.mlp.down_proj.weight and 3 more")


@pytest.mark.parametrize(
    ("value", "module"), [(float("nan"), "mlp.down_proj"), (float("-inf"), "self_attn.v_proj")]
)
def test_what_is_not_finite_is_named(value: float, module: str, hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("qwen3", dtype="bfloat16")
    tensors = tensors_of(plain)
    tensors[f"model.layers.1.{module}.weight"][3, 5] = value
    source = quantized.with_tensors(plain, tmp_path / "source", tensors, None)
    with pytest.raises(ReshardError, match="contains NaN or Inf") as raised:
        reshard.convert(source, tmp_path / "out", quantize="nvfp4")
    assert raised.value.problems[0].tensor == f"model.layers.1.{module}.weight"
    assert not (tmp_path / "out").exists()
