"""DeepSeek-V4 as published: FP8 with experts in MXFP4, named, copied, made plain, and quantized to the same storage."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, FP8Experts, FP8GroupedLinear, FP8Linear
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import reshard
from reshard.base.errors import ReshardError
from reshard.model.quantizer import STORAGES
from tests.commandline import reshard as command
from tests.environments import python
from tests.genuine import deepseek_v4, quantized
from tests.judges import assert_same_tensors, tensors_of
from tests.test_quantizing import of_many_kinds, read

Tensors = dict[str, torch.Tensor]
TOKENS = torch.arange(256).view(1, 256)


def convert(source: Path, out: Path, **options: Any) -> Any:
    return reshard.convert(source, out, no_tokenizer=True, **options)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepseek_v4.plain(tmp_path_factory.mktemp("v4") / "plain")


@pytest.fixture(scope="module")
def published(plain: Path) -> Path:
    return deepseek_v4.published(plain, plain.parent / "published")


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def dequantized_by_transformers(folder: Path) -> Tensors:
    """All tensors by the operation with which transformers loads them, also of what it does not load."""
    stored, made = load_file(folder / "model.safetensors"), Fp8Dequantize(None)
    plain = {name: tensor for name, tensor in stored.items() if not name.endswith(".scale")}
    for name in plain:
        scale = stored.get(name.removesuffix("weight") + "scale")
        if scale is not None:
            parts = {"weight": plain[name], "weight_scale_inv": scale}
            plain[name] = made.convert(parts)["weight"]
    return plain


def loaded(folder: Path) -> Any:
    """The model that transformers loads without missing anything."""
    model, found = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(found.values()), found
    return model


def assert_same_model(one: Path, other: Path) -> None:
    first, second = loaded(one), loaded(other)
    assert_same_tensors(first.state_dict(), second.state_dict())
    with torch.inference_mode():
        logits = first(TOKENS, use_cache=False).logits
        assert logits.float().std() > 0.1
        assert torch.equal(second(TOKENS, use_cache=False).logits, logits)


# ------------------------------------------------------------------------------------------------ read


def test_it_is_named(published: Path) -> None:
    shown = command("inspect", published)
    assert shown.code == 0
    assert "fp8, e4m3, blocks of 128 × 128, 35 weights in FP8, 48 weights in MXFP4" in " ".join(
        shown.out.split()
    )
    plain = sum(tensor.numel() for tensor in dequantized_by_transformers(published).values())
    assert reshard.open(published).checkpoint.parameters == plain


def test_it_becomes_plain(published: Path, tmp_path: Path) -> None:
    """With the publisher's names, and in float32 what it has in float32, as transformers keeps it."""
    convert(published, tmp_path / "out", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "out", dequantized_by_transformers(published))
    assert "expert_dtype" not in config_of(tmp_path / "out")
    assert_same_model(published, tmp_path / "out")


def of_v41(draw: torch.Generator) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Weights of each kind in DeepSeek-V4.1, with their scales: of tiles, of parts of rows, of FP4."""
    for name, rows, block in (("attn.wq_a", 96, 32), ("engram.embed", 70, 1), ("engram.wkv", 64, 1)):
        values = torch.randn(rows, 128, generator=draw).mul(100).to(torch.float8_e4m3fn)
        yield name, values, torch.randint(110, 130, (rows // block, 4), generator=draw, dtype=torch.uint8)
    values = torch.randint(0, 256, (64, 64), generator=draw, dtype=torch.uint8).view(torch.int8)
    yield "ffn.experts.0.w1", values, torch.randint(110, 130, (64, 4), generator=draw, dtype=torch.uint8)


def test_deepseek_v41_becomes_plain(tmp_path: Path) -> None:
    """Tiles of 32 × 32, and expert_dtype inside of quantization_config; its model is not declared."""
    tensors = {}
    for name, values, scales in of_v41(torch.Generator().manual_seed(0)):
        tensors |= {
            f"layers.0.{name}.weight": values,
            f"layers.0.{name}.scale": scales.view(torch.float8_e8m0fnu),
        }
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    settings = {key: value for key, value in deepseek_v4.SETTINGS.items() if key != "fmt"}
    settings |= {"weight_block_size": [32, 32], "expert_dtype": "fp4"}
    config = {"model_type": "deepseek_v41", "dtype": "bfloat16", "quantization_config": settings}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "source", tmp_path / "out", dtype="bfloat16")
    assert_same_tensors(tensors_of(tmp_path / "out"), dequantized_by_transformers(tmp_path / "source"))
    convert(tmp_path / "source", tmp_path / "copy", max_shard_size="10kB")
    assert_same_tensors(tensors_of(tmp_path / "copy"), tensors)
    assert config_of(tmp_path / "copy")["quantization_config"] == settings


def test_scales_may_be_named_as_in_memory(published: Path, tmp_path: Path) -> None:
    tensors = {
        name.replace(".scale", ".weight_scale_inv"): tensor for name, tensor in tensors_of(published).items()
    }
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "source" / "config.json").write_bytes((published / "config.json").read_bytes())
    convert(tmp_path / "source", tmp_path / "out", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "out", dequantized_by_transformers(published))


def test_it_is_copied_to_other_shards(published: Path, tmp_path: Path) -> None:
    convert(published, tmp_path / "out", max_shard_size="300kB")
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(published))
    found = config_of(tmp_path / "out")
    assert (found["expert_dtype"], found["quantization_config"]) == ("fp4", deepseek_v4.SETTINGS)
    assert_same_model(published, tmp_path / "out")


@pytest.mark.parametrize("lost", ["layers.1.ffn.experts.2.w1.scale", "layers.1.ffn.experts.2.w1.weight"])
def test_a_part_that_is_missing(lost: str, published: Path, tmp_path: Path) -> None:
    tensors = tensors_of(published)
    del tensors[lost]
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "source" / "config.json").write_bytes((published / "config.json").read_bytes())
    for options in ({"dtype": "bfloat16"}, {"max_shard_size": "300kB"}):
        with pytest.raises(ReshardError, match="quantized weight is incomplete"):
            convert(tmp_path / "source", tmp_path / "out", **options)


# ------------------------------------------------------------------------------------------------ written


def test_it_is_quantized_to_the_same_storage(published: Path, tmp_path: Path) -> None:
    convert(published, tmp_path / "plain", dtype="bfloat16")
    convert(tmp_path / "plain", tmp_path / "out", quantize="fp8-mxfp4")
    found, expected = tensors_of(tmp_path / "out"), tensors_of(published)
    assert {name: (each.dtype, each.shape) for name, each in found.items()} == {
        name: (each.dtype, each.shape) for name, each in expected.items()
    }
    now, was = config_of(tmp_path / "out"), config_of(published)
    assert [now[key] for key in ("expert_dtype", "quantization_config")] == [
        was[key] for key in ("expert_dtype", "quantization_config")
    ]
    assert_same_tensors(dequantized_by_transformers(tmp_path / "out"), dequantized_by_transformers(published))
    convert(tmp_path / "out", tmp_path / "again", dtype="bfloat16")
    assert_same_tensors(tensors_of(tmp_path / "again"), tensors_of(tmp_path / "plain"))
    convert(published, tmp_path / "direct", quantize="fp8-mxfp4")
    assert_same_tensors(tensors_of(tmp_path / "direct"), found)
    assert_same_model(published, tmp_path / "out")


def test_fp8_is_what_transformers_makes(plain: Path, published: Path, tmp_path: Path) -> None:
    plan = convert(plain, tmp_path / "out", quantize="fp8-mxfp4", max_shard_size="300kB").plan
    assert "83 weights are quantized to fp8-mxfp4" in plan.notes
    found = tensors_of(tmp_path / "out")
    others = {name: each for name, each in tensors_of(published).items() if ".experts." not in name}
    assert_same_tensors({name: found[name] for name in others}, others)
    compared = reshard.verify(plain, tmp_path / "out")
    assert compared.equal and len(compared.rounded) == 83
    assert reshard.verify(plain, tmp_path / "out", proof=True)


def test_a_gpu_would_find_what_transformers_expects(plain: Path, tmp_path: Path) -> None:
    """The same modules in FP8, and their parts in the same dtypes and shapes; on a CPU, it only makes plain weights."""
    convert(plain, tmp_path / "out", quantize="fp8-mxfp4")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    how = FineGrainedFP8Config(**{k: v for k, v in config.quantization_config.items() if k != "fmt"})
    FineGrainedFP8HfQuantizer(how, pre_quantized=True)._process_model_before_weight_loading(model)
    kinds = (FP8Linear, FP8GroupedLinear, FP8Experts)
    replaced = {name: each for name, each in model.named_modules() if isinstance(each, kinds)}
    experts: dict[str, list[torch.Tensor]] = {}
    linears, stored = {}, tensors_of(tmp_path / "out")
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if not name.startswith("layers.") or f"{module}.scale" not in stored:
            continue
        if ".experts." in module:
            layer, _, projection = module.partition(".ffn.experts.")
            key = f"model.{layer}.mlp.experts {projection[-2:]} {part}"
            experts.setdefault(key, []).append(tensor)
            continue
        renamed = f"{module}."
        for each in renamings:
            renamed, _ = each.rename_source_key(renamed)
        linears[f"model.{renamed.removesuffix('.')}", part] = (tensor.dtype, tuple(tensor.shape))
    expected = {
        (name, part): (getattr(module, key).dtype, tuple(getattr(module, key).shape))
        for name, module in replaced.items()
        if not isinstance(module, FP8Experts)
        for part, key in (("weight", "weight"), ("scale", "weight_scale_inv"))
    }
    assert linears == expected
    for name, module in replaced.items():
        if not isinstance(module, FP8Experts):
            continue
        for part, suffix in (("weight", ""), ("scale", "_scale_inv")):
            gate, up, down = (torch.stack(experts.pop(f"{name} w{each} {part}")) for each in (1, 3, 2))
            for whole, key in ((torch.cat([gate, up], 1), "gate_up_proj"), (down, "down_proj")):
                there = getattr(module, key + suffix)
                assert (whole.dtype, whole.shape) == (there.dtype, there.shape), (name, key, suffix)
    assert not experts


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_mxfp4_is_what_torchao_makes(dtype: torch.dtype, tmp_path: Path) -> None:
    """With scales that are rounded up, as DeepSeek's own kernels round those of activations."""
    weight, name = of_many_kinds((96, 256), dtype), "layers.0.ffn.experts.0.w1.weight"
    save_file({name: weight}, tmp_path / "model.safetensors")
    code = (
        "import sys; from safetensors.torch import load_file, save_file\n"
        "from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx\n"
        "import torch\n"
        "(weight,) = load_file(sys.argv[1]).values()\n"
        "scales, values = to_mx(weight.bfloat16(), torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL)\n"
        "save_file({'values': values.view(torch.uint8), 'scales': scales.view(torch.uint8)}, sys.argv[2])\n"
    )
    subprocess.run(
        [python("quantizers"), "-c", code, tmp_path / "model.safetensors", tmp_path / "made"], check=True
    )
    made = load_file(tmp_path / "made")
    storage = STORAGES["fp8-mxfp4"].of(name)
    parts = storage.parts(name, reshard.open(tmp_path).tensors[name])
    for part, role in zip(parts, ("values", "scales"), strict=True):
        assert part.shape == tuple(made[role].shape)
        found = read(part, 0, part.view.numel).view(np.uint8)
        np.testing.assert_array_equal(found, made[role].flatten().numpy())


def test_scales_are_what_torch_converts(tmp_path: Path) -> None:
    """Of FP8, for blocks of zeros, NaN and Inf too."""
    weight, name = of_many_kinds((300, 200), torch.float32, finite=False), "layers.0.attn.wq_a.weight"
    save_file({name: weight}, tmp_path / "model.safetensors")
    tensor = reshard.open(tmp_path).tensors[name]
    plain, exponents = (STORAGES[how].parts(name, tensor)[1] for how in ("fp8-ue8m0", "fp8-mxfp4"))
    powers = torch.from_numpy(read(plain, 0, plain.view.numel).view(np.float32).copy())
    expected = powers.to(torch.float8_e8m0fnu).view(torch.uint8).numpy()
    np.testing.assert_array_equal(read(exponents, 0, exponents.view.numel), expected)
    assert torch.isnan(powers).any()


def test_rows_that_are_no_multiple_of_32(plain: Path, tmp_path: Path) -> None:
    width = 112
    tensors = tensors_of(plain)
    for name, tensor in tensors.items():
        if "experts." in name:
            tensors[name] = (tensor[:, :width] if ".w2." in name else tensor[:width]).contiguous()
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": width}))
    with pytest.raises(ReshardError, match="not divisible into blocks"):
        convert(tmp_path / "source", tmp_path / "out", quantize="fp8-mxfp4")
