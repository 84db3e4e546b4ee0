"""Writing int4 as Kimi-K2.5 stores its experts: what compressed-tensors packs, without loss for what came of int4."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard.algebra.tensors import Tensor
from reshard.base.errors import ReshardError
from reshard.formats.module_quantization import QuantizationSettings
from reshard.model.quantizer import STORAGES
from reshard.transfer.gather import Gatherer
from reshard.transfer.thread_files import OpenFiles
from tests.environments import python
from tests.genuine import quantized
from tests.judges import assert_same_tensors, tensors_of

Models = Callable[..., Path]
Tensors = dict[str, torch.Tensor]
KIMI: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def as_trained(plain: Path, out: Path) -> Path:
    """The experts with int4 values as they leave a training: in each group, the largest magnitude is 7."""
    draw = torch.Generator().manual_seed(0)
    tensors = tensors_of(plain)
    for name in [name for name in tensors if ".mlp.experts." in name]:
        rows, columns = tensors.pop(name).shape
        numbers = torch.randint(-7, 8, (rows, columns // 32, 32), generator=draw)
        numbers[..., 3] = torch.where(torch.rand(rows, columns // 32, generator=draw) < 0.5, -7, 7)
        items = ((numbers.view(rows, -1, 8) + 8) << torch.arange(0, 32, 4)).sum(-1)
        tensors |= {
            f"{name}_packed": torch.where(items >= 1 << 31, items - (1 << 32), items).to(torch.int32),
            f"{name}_scale": (torch.rand(rows, columns // 32, generator=draw) / 50 + 1e-3).to(torch.bfloat16),
            f"{name}_shape": torch.tensor([rows, columns]),
        }
    return quantized.with_tensors(plain, out, tensors, KIMI)


# ------------------------------------------------------------------------------------------------ the package


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_int4_is_what_compressed_tensors_packs(dtype: str, hf_model: Models, tmp_path: Path) -> None:
    plain, out = hf_model("deepseek_v3_mtp", dtype=dtype), tmp_path / "out"
    plan = reshard.convert(plain, out, quantize="int4", max_shard_size="100kB").plan
    make = [python("llm-compressor"), "-m", "tests.genuine.make_nvfp4"]
    subprocess.run([*make, "pack", plain, out, tmp_path / "expected.safetensors"], check=True)
    found = tensors_of(out)
    assert_same_tensors(found, load_file(tmp_path / "expected.safetensors"))
    chosen = [name for name in found if name.endswith("_packed")]
    assert chosen and all(".mlp.experts." in name for name in chosen)
    assert f"{len(chosen)} weights are quantized to int4" in plan.notes
    subprocess.run([*make, "plain", out, tmp_path / "plain.safetensors"], check=True)
    reshard.convert(out, tmp_path / "plain", dtype=dtype)
    assert_same_tensors(
        tensors_of(tmp_path / "plain"),
        {
            name: part.to(getattr(torch, dtype)) if part.dtype == torch.bfloat16 else part
            for name, part in load_file(tmp_path / "plain.safetensors").items()
        },
    )


def odd_weights() -> Tensors:
    """Weights of many sizes, with zeros of both signs, groups of zeros, tiny or huge, and halves between codes."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        for size in (1e-3, 1.0, 100.0, 1e-5 if kind == torch.float16 else 1e-30):
            weight = torch.randn(64, 64, generator=draw) * size
            weight[3], weight[4, :16], weight[5] = 0, 0, -0.0
            weight[6, ::2] *= 1e-6
            weight[7, 1] = weight.abs().max() * 50
            made.append(weight.to(kind))
        made.append((torch.randint(-14, 15, (64, 64), generator=draw) / 4).to(kind))
        made.append(torch.zeros(32, 32).to(kind))
    return {f"model.layers.{at}.mlp.experts.0.up_proj.weight": weight for at, weight in enumerate(made)}


@pytest.mark.slow
def test_odd_weights_as_compressed_tensors_packs_them(hf_model: Models, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    for folder in (source, out):
        folder.mkdir()
    save_file(odd_weights(), source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((hf_model("deepseek_v3") / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config))
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": KIMI}))
    made: Tensors = {}
    for name, tensor in reshard.open(source).checkpoint.tensors.items():
        values, scales, shape = (read(part) for part in STORAGES["int4"].parts(name, tensor))
        kind = getattr(torch, tensor.dtype.name)
        scale = torch.from_numpy(scales.copy()).view(kind)
        made |= {f"{name}_packed": torch.from_numpy(values.view(np.int32).copy()), f"{name}_scale": scale}
        made[f"{name}_shape"] = torch.from_numpy(shape.view(np.int64).copy())
    save_file(made, out / "model.safetensors", metadata={"format": "pt"})
    make = [python("llm-compressor"), "-m", "tests.genuine.make_nvfp4", "pack"]
    subprocess.run([*make, source, out, tmp_path / "expected.safetensors"], check=True)
    assert_same_tensors(made, load_file(tmp_path / "expected.safetensors"))


def read(part: Tensor) -> np.ndarray[Any, Any]:
    """All elements, which are the same in ranges."""
    with closing(OpenFiles()) as files:
        gatherer, count = Gatherer(files, None), part.view.numel
        whole = gatherer.read(part, 0, count)
        for low in range(0, count, 37):
            high = min(low + 37, count)
            np.testing.assert_array_equal(gatherer.read(part, low, high), whole[low:high])
    return whole.reshape(part.shape)


# ------------------------------------------------------------------------------------------------ the values


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_was_int4_keeps_every_byte(dtype: str, hf_model: Models, tmp_path: Path) -> None:
    """By way of Megatron, too. In bfloat16, a seventh of the largest magnitude does not always tell the scale."""
    source = as_trained(hf_model("deepseek_v3_mtp", dtype="bfloat16"), tmp_path / "source")
    reshard.convert(source, tmp_path / "native", to="megatron", tp=2, pp=2, ep=2, dtype=dtype)
    reshard.convert(tmp_path / "native", tmp_path / "out", quantize="int4")
    found, expected = tensors_of(tmp_path / "out"), tensors_of(source)
    experts = [name for name in expected if ".mlp.experts." in name]
    assert len(experts) > 50
    for name in experts:
        assert torch.equal(found[name], expected[name].to(found[name].dtype)), name
    quotients = off = 0
    for name in [name for name in experts if name.endswith("_scale")]:
        packed, scale = expected[name.replace("_scale", "_packed")], expected[name]
        largest = (7 * scale.float()).to(torch.bfloat16)
        quotients, off = quotients + scale.numel(), off + int((largest / 7 != scale).sum())
        assert packed.shape[1] * 8 == scale.shape[1] * 32
    assert off > quotients / 20
    if dtype == "bfloat16":
        assert found.keys() == expected.keys()
        reshard.convert(tmp_path / "out", tmp_path / "plain", dtype="bfloat16")
        reshard.convert(source, tmp_path / "expected", dtype="bfloat16")
        assert_same_tensors(tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "expected"))


def test_other_weights_are_as_near_as_four_bits_allow(hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("deepseek_v3", dtype="bfloat16")
    reshard.convert(plain, tmp_path / "out", quantize="int4")
    reshard.convert(tmp_path / "out", tmp_path / "plain", dtype="bfloat16")
    found, expected = tensors_of(tmp_path / "plain"), tensors_of(plain)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if ".mlp.experts." not in name:
            assert torch.equal(found[name], tensor), name
            continue
        groups, made = (each.float().unflatten(1, (-1, 32)) for each in (tensor, found[name]))
        half = groups.abs().amax(2, keepdim=True) / 14
        assert ((made - groups).abs() <= half * 1.13).all(), name


def test_what_stays_plain_is_ignored_by_loaders(hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("deepseek_v3_mtp", dtype="bfloat16")
    plan = reshard.convert(plain, tmp_path / "out", quantize="int4").plan
    told = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    settings, found = QuantizationSettings(told), tensors_of(tmp_path / "out")
    for name in [name for name in found if name.endswith(".weight") and found[name].ndim == 2]:
        assert settings.of(name.removesuffix(".weight")).schemes == {"plain"}, name
    for name in [name for name in found if name.endswith("_packed")]:
        assert "packed int" in settings.of(name.removesuffix(".weight_packed")).schemes
    assert plan.parameters == reshard.open(tmp_path / "out").checkpoint.parameters
    assert reshard.verify(plain, tmp_path / "out", proof=True)


def test_a_model_without_experts_has_nothing_to_quantize(hf_model: Models, tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match="no weight can be quantized"):
        reshard.convert(hf_model("qwen3", dtype="bfloat16"), tmp_path / "out", quantize="int4")


def test_rows_that_are_no_multiple_of_32(hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("deepseek_v3", dtype="bfloat16", moe_intermediate_size=48)
    with pytest.raises(ReshardError, match="not divisible into blocks"):
        reshard.convert(plain, tmp_path / "out", quantize="int4")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_not_finite_is_named(value: float, hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("deepseek_v3", dtype="bfloat16")
    tensors, name = tensors_of(plain), "model.layers.1.mlp.experts.2.down_proj.weight"
    tensors[name][3, 5] = value
    source = quantized.with_tensors(plain, tmp_path / "source", tensors, None)
    with pytest.raises(ReshardError, match="contains NaN or Inf") as raised:
        reshard.convert(source, tmp_path / "out", quantize="int4")
    assert raised.value.problems[0].tensor == name
