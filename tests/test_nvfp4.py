"""NVFP4, FP8 of ModelOpt, and files that mix them: each weight by what is stored beside it, checked with the config."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard.base.errors import ReshardError
from reshard.formats.module_quantization import QuantizationSettings, compiled_pattern
from tests.environments import python
from tests.genuine import quantized
from tests.judges import assert_same_tensors, tensors_of

Models = Callable[..., Path]
Tensors = dict[str, torch.Tensor]

MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
FP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": FP4_WEIGHTS}},
    "ignore": ["lm_head"],
}
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])


def with_nvfp4(
    plain: Path, out: Path, told: dict[str, object] | None, *, fp8: str = "none", packed: bool = False
) -> tuple[Path, Tensors]:
    """The projections in random NVFP4, and all weights; those whose names contain `fp8` in FP8 of ModelOpt.

    `packed`: with the names and the arithmetic of compressed-tensors, which divides by a scale for all blocks.
    """
    draw = torch.Generator().manual_seed(0)
    tensors = load_file(plain / "model.safetensors")
    expected: Tensors = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors.pop(name).shape
        if fp8 in name:
            weight = torch.randn(rows, columns, generator=draw).to(torch.float8_e4m3fn)
            scale = torch.rand((), generator=draw) / 50
            tensors |= {name: weight, f"{name}_scale": scale}
            expected[name] = weight.to(torch.bfloat16) * scale.to(torch.bfloat16)
            continue
        codes = torch.randint(0, 16, (rows, columns), generator=draw)
        scales = (torch.rand(rows, columns // 16, generator=draw) * 400).to(torch.float8_e4m3fn)
        outer = torch.rand(1, generator=draw) * 4000 if packed else torch.rand((), generator=draw) / 4000
        both = scales.float() / outer if packed else scales.float() * outer
        values = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0) + (0.0 if not packed else -0.0)
        expected[name] = (values * both.repeat_interleave(16, 1)).to(torch.bfloat16)
        items = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
        tensors[f"{name}_packed" if packed else name] = items
        tensors[f"{name}_scale"] = scales
        tensors[f"{name}_global_scale" if packed else f"{name}_scale_2"] = outer
        tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor(1.0)
    return quantized.with_tensors(plain, out, tensors, told), expected


# ------------------------------------------------------------------------------------------------ the packages


KINDS = ["NVFP4", "NVFP4_AWQ", "mixed", "FP8", "FP8_PER_CHANNEL", "W4A8_NVFP4_FP8", "MXFP8"]
NAMES = ["qwen3", "qwen3_moe", "qwen3_tied"]
NOT_EXPORTED = ("NVFP4_AWQ", "qwen3_moe")
"""What ModelOpt 0.47 cannot export with transformers 5.24."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [pair for pair in product(KINDS, NAMES) if pair != NOT_EXPORTED])
def test_as_modelopt_dequantizes(kind: str, name: str, hf_model: Models, tmp_path: Path) -> None:
    plain, source = hf_model(name, dtype="bfloat16"), tmp_path / "source"
    make = [python("modelopt"), "-m", "tests.genuine.make_modelopt", kind]
    subprocess.run([*make, plain, source, tmp_path / "expected.safetensors"], check=True)
    expected = load_file(tmp_path / "expected.safetensors")
    reshard.convert(source, tmp_path / "out", to="huggingface", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "out", expected)
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    reshard.convert(source, tmp_path / "native", to="megatron", tp=2)
    assert reshard.verify(source, tmp_path / "native").equal
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config")  # older releases wrote hf_quant_config.json only
    (source / "config.json").write_text(json.dumps(config))
    reshard.convert(source, tmp_path / "older", to="huggingface", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "older", expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["NVFP4", "W4A16_NVFP4"])
def test_stacked_experts_as_modelopt_dequantizes_them(kind: str, hf_model: Models, tmp_path: Path) -> None:
    plain, source = hf_model("gpt_oss", dtype="bfloat16"), tmp_path / "source"
    make = [python("modelopt"), "-m", "tests.genuine.make_modelopt", kind]
    subprocess.run([*make, plain, source, tmp_path / "expected.safetensors"], check=True)
    expected = load_file(tmp_path / "expected.safetensors")
    assert sum(tensor.ndim == 3 for tensor in expected.values()) == 8
    reshard.convert(source, tmp_path / "out", to="huggingface", dtype="bfloat16", max_shard_size="50kB")
    quantized.assert_holds(tmp_path / "out", expected)
    assert reshard.open(source).checkpoint.parameters == reshard.open(plain).checkpoint.parameters
    reshard.convert(source, tmp_path / "copy", to="huggingface", max_shard_size="50kB")
    assert reshard.verify(source, tmp_path / "copy").equal
    reshard.convert(source, tmp_path / "native", to="megatron", tp=2, etp=1, ep=2, memory="24MiB")
    assert reshard.verify(source, tmp_path / "native", proof=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "qwen3_tied"])
@pytest.mark.parametrize("kind", ["NVFP4A16", "mixed"])
def test_as_compressed_tensors_decompresses(kind: str, name: str, hf_model: Models, tmp_path: Path) -> None:
    plain, source = hf_model(name, dtype="bfloat16"), tmp_path / "source"
    make = [python("llm-compressor"), "-m", "tests.genuine.make_nvfp4", kind]
    subprocess.run([*make, plain, source, tmp_path / "expected.safetensors"], check=True)
    reshard.convert(source, tmp_path / "out", to="huggingface", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "out", load_file(tmp_path / "expected.safetensors"))
    reshard.convert(source, tmp_path / "native", to="megatron", tp=2)
    assert reshard.verify(source, tmp_path / "native").equal


@pytest.mark.slow
def test_as_transformers_loads_it(hf_model: Models, tmp_path: Path) -> None:
    """With `run_compressed=False`, and compressed-tensors. transformers 5.24 cannot load a mixed file this way."""
    plain, source = hf_model("qwen3", dtype="bfloat16"), tmp_path / "source"
    make = [python("llm-compressor"), "-m", "tests.genuine.make_nvfp4", "NVFP4A16"]
    subprocess.run([*make, plain, source, tmp_path / "unused.safetensors"], check=True)
    load = [python("quantizers"), "-m", "tests.genuine.make_quantized", "plain"]
    subprocess.run([*load, source, tmp_path / "expected.safetensors"], check=True)
    reshard.convert(source, tmp_path / "out", to="huggingface", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "out", load_file(tmp_path / "expected.safetensors"))


# ------------------------------------------------------------------------------------------------ the formulas


@pytest.mark.core("modelopt-None", "compressed-tensors-24MiB")
@pytest.mark.parametrize("memory", [None, "24MiB"])
@pytest.mark.parametrize("packed", [False, True], ids=["modelopt", "compressed-tensors"])
def test_nvfp4_becomes_plain(packed: bool, memory: str | None, hf_model: Models, tmp_path: Path) -> None:
    told = COMPRESSED if packed else MODELOPT
    plain = hf_model("qwen3_moe", dtype="bfloat16")
    source, expected = with_nvfp4(plain, tmp_path / "source", told, packed=packed)
    limit = {"memory": memory} if memory else {}
    reshard.convert(source, tmp_path / "out", dtype="bfloat16", **limit)
    quantized.assert_holds(tmp_path / "out", expected)
    reshard.convert(source, tmp_path / "native", to="megatron", tp=2, etp=2, **limit)
    assert reshard.verify(source, tmp_path / "native").equal
    assert reshard.verify(source, tmp_path / "native", proof=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_factors_of_inputs_move_into_the_weight(dtype: str, hf_model: Models, tmp_path: Path) -> None:
    """After it was rounded to the dtype, and rounded again."""
    told, kind = {**MODELOPT, "quant_algo": "NVFP4_AWQ", "pre_quant_scale": True}, getattr(torch, dtype)
    source, expected = with_nvfp4(hf_model("qwen3", dtype="bfloat16"), tmp_path / "source", told)
    reshard.convert(source, tmp_path / "plain", dtype=dtype)
    tensors, draw = load_file(source / "model.safetensors"), torch.Generator().manual_seed(1)
    expected = load_file(tmp_path / "plain" / "model.safetensors")
    for name in [name for name in expected if name.endswith("o_proj.weight")]:
        factors = (torch.rand(expected[name].shape[1], generator=draw) + 0.5).to(torch.bfloat16)
        tensors[name.removesuffix("weight") + "pre_quant_scale"] = factors
        expected[name] = (expected[name].float() * factors.float()).to(kind)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    reshard.convert(source, tmp_path / "out", dtype=dtype)
    assert_same_tensors(tensors_of(tmp_path / "out"), expected)
    reshard.convert(source, tmp_path / "native", to="megatron", tp=2, memory="24MiB", dtype=dtype)
    assert reshard.verify(tmp_path / "native", tmp_path / "out").equal


def test_stacked_experts_become_plain(hf_model: Models, tmp_path: Path) -> None:
    """Packed along their inputs, which are not the last axis."""
    plain, draw = hf_model("gpt_oss", dtype="bfloat16"), torch.Generator().manual_seed(0)
    tensors = load_file(plain / "model.safetensors")
    expected = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        codes = torch.randint(0, 16, (experts, inputs, outputs), generator=draw)
        scales = torch.rand(experts, inputs // 16, outputs, generator=draw).mul(400).to(torch.float8_e4m3fn)
        outer = torch.rand((), generator=draw) / 4000
        values = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0) + 0.0
        both = (scales.float() * outer).repeat_interleave(16, 1)
        expected[name] = (values * both).to(torch.bfloat16)
        tensors |= {
            name: (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
            f"{name}_weight_scale": scales,
            f"{name}_weight_scale_2": outer,
            f"{name}_input_scale": torch.tensor(1.0),
        }
    source = quantized.with_tensors(plain, tmp_path / "source", tensors, MODELOPT)
    reshard.convert(source, tmp_path / "out", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "out", expected)
    reshard.convert(source, tmp_path / "native", to="megatron", tp=2, etp=1, ep=2, memory="24MiB")
    assert reshard.verify(source, tmp_path / "native", proof=True)
    lost = "model.layers.1.mlp.experts.down_proj_weight_scale_2"
    del tensors[lost]
    broken = quantized.with_tensors(plain, tmp_path / "broken", tensors, MODELOPT)
    assert refused(broken, tmp_path / "other", "quantized-weight-incomplete") == [
        "model.layers.1.mlp.experts.down_proj"
    ]


def test_attention_in_fp8_and_the_rest_in_nvfp4(hf_model: Models, tmp_path: Path) -> None:
    layers = {
        f"model.layers.{layer}.{module}": {"quant_algo": algorithm}
        for layer in range(4)
        for module, algorithm in (
            *((f"self_attn.{each}_proj", "FP8") for each in "qkvo"),
            *((f"mlp.{each}_proj", "NVFP4") for each in ("gate", "up", "down")),
        )
    }
    told = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    plain = hf_model("qwen3", dtype="bfloat16")
    source, expected = with_nvfp4(plain, tmp_path / "source", told, fp8="self_attn")
    reshard.convert(source, tmp_path / "out", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "out", expected)


@pytest.mark.parametrize("nested", [False, True])
def test_settings_in_a_file_of_modelopt_only(nested: bool, hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("qwen3", dtype="bfloat16")
    content = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    told = {"quant_method": "modelopt", **content} if nested else None
    source, expected = with_nvfp4(plain, tmp_path / "source", told, fp8="proj")
    if not nested:
        (source / "hf_quant_config.json").write_text(json.dumps(content))
    reshard.convert(source, tmp_path / "out", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "out", expected)
    reshard.convert(source, tmp_path / "copy", to="huggingface", max_shard_size="100kB")
    config = json.loads((tmp_path / "copy" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "modelopt"
    reshard.convert(tmp_path / "copy", tmp_path / "again", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "again", expected)


# ------------------------------------------------------------------------------------------------ what disagrees


def refused(source: Path, out: Path, code: str) -> list[str]:
    """The tensors that an error with this code names."""
    with pytest.raises(ReshardError) as raised:
        reshard.convert(source, out, dtype="bfloat16")
    assert {each.code for each in raised.value.problems} == {code}
    assert not out.exists()
    return [str(each.tensor) for each in raised.value.problems]


@pytest.mark.parametrize(
    "told",
    [
        {**MODELOPT, "quant_algo": "FP8"},
        {**MODELOPT, "ignore": ["lm_head", "model.layers.*"]},
        {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "exclude_modules": []}},
    ],
    ids=["another algorithm", "not quantized", "nested"],
)
def test_all_weights_that_are_not_as_the_config_says(
    told: dict[str, object], hf_model: Models, tmp_path: Path
) -> None:
    source, _ = with_nvfp4(hf_model("qwen3", dtype="bfloat16"), tmp_path / "source", told)
    names = refused(source, tmp_path / "out", "quantization-config-differs")
    assert len(names) == 7 and all(name.endswith("(all 4)") for name in names)
    reshard.convert(
        source, tmp_path / "copy", to="huggingface", max_shard_size="100kB"
    )  # bytes do not depend on it


def test_groups_that_name_other_modules(hf_model: Models, tmp_path: Path) -> None:
    fp8 = {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float"}}
    fp4 = {"targets": ["Linear"], "weights": FP4_WEIGHTS, "format": "nvfp4-pack-quantized"}
    told = {**COMPRESSED, "format": "mixed-precision", "config_groups": {"a": fp8, "b": fp4}}
    source, _ = with_nvfp4(hf_model("qwen3", dtype="bfloat16"), tmp_path / "source", told, packed=True)
    names = refused(source, tmp_path / "out", "quantization-config-differs")
    assert len(names) == 4 and all("self_attn" in name for name in names)


def test_a_module_named_as_quantized_is_stored_plain(hf_model: Models, tmp_path: Path) -> None:
    layers = {"lm_head": {"quant_algo": "FP8"}, "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4"}}
    told = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    source, _ = with_nvfp4(hf_model("qwen3", dtype="bfloat16"), tmp_path / "source", told)
    assert refused(source, tmp_path / "out", "quantization-config-differs") == ["lm_head.weight"]


@pytest.mark.parametrize("packed", [False, True], ids=["modelopt", "compressed-tensors"])
def test_scales_that_are_missing_or_misshapen(packed: bool, hf_model: Models, tmp_path: Path) -> None:
    told = COMPRESSED if packed else MODELOPT
    source, _ = with_nvfp4(hf_model("qwen3", dtype="bfloat16"), tmp_path / "source", told, packed=packed)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    outer = f"{name}_global_scale" if packed else f"{name}_scale_2"
    other = "model.layers.2.mlp.up_proj.weight"
    damaged = [
        ({outer: tensors[outer].repeat(2).reshape(2)}, "quantized-scales-wrong"),
        ({f"{name}_scale": tensors[f"{name}_scale"][:, :2].contiguous()}, "quantized-scales-wrong"),
        ({f"{name}_scale": tensors[f"{name}_scale"].float()}, "quantized-scales-wrong"),
        ({f"{name}_scale": tensors[f"{name}_scale"].flatten()}, "quantized-scales-wrong"),
        ({f"{name}_scale": None}, "quantized-weight-incomplete"),
        ({name.removesuffix("weight") + "pre_quant_scale": torch.ones(63)}, "quantized-scales-wrong"),
        ({name.removesuffix("weight") + "svdquant_lora_a": torch.ones(4, 64)}, "quantized-scales-wrong"),
    ]
    for changed, code in damaged:
        if packed and any(key.endswith(("pre_quant_scale", "lora_a")) for key in changed):
            continue
        module = "layers.1", "layers.2"
        both = {
            **changed,
            **{
                key.replace(*module): value if value is None else value.clone()
                for key, value in changed.items()
            },
        }
        now = {key: value for key, value in (tensors | both).items() if value is not None}
        save_file(now, source / "model.safetensors", metadata={"format": "pt"})
        found = refused(source, tmp_path / "out", code)
        assert sorted(found) == [name, other], code


# ------------------------------------------------------------------------------------------------ names of modules


def test_settings_of_modules() -> None:
    fp8 = {
        "targets": ["model.layers.1.mlp.up_proj", r"re:.*self_attn\.q.*"],
        "weights": {"num_bits": 8, "type": "float"},
    }
    told = {**COMPRESSED, "config_groups": {"a": {"targets": ["Linear"], "weights": FP4_WEIGHTS}, "b": fp8}}
    settings = QuantizationSettings({**told, "ignore": ["lm_head", "re:.*gate$"]})
    assert "NVFP4" in settings.of("model.layers.0.mlp.up_proj").schemes
    assert "FP8" in settings.of("model.layers.1.mlp.up_proj").schemes
    assert "FP8" in settings.of("model.layers.1.self_attn.q_proj").schemes
    assert settings.of("model.layers.0.mlp.gate").schemes == settings.of("lm_head").schemes == {"plain"}
    layers = {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4"}}
    settings = QuantizationSettings({"quant_method": "modelopt", "quantized_layers": layers})
    assert settings.of("model.layers.0.mlp.experts.7.up_proj").schemes == {"NVFP4"}
    assert not settings.of("model.layers.1.mlp.experts.7.up_proj").schemes
    assert not QuantizationSettings({"quant_method": "fp8"}).of("lm_head").schemes


def test_slow_expressions_are_not_run() -> None:
    assert compiled_pattern(r".*self_attn\.(q|k|v|o)_proj$")
    for slow in ("(a+)+$", "(a|a)*$", ".*" * 20, "(" * 9):
        assert compiled_pattern(slow) is None


@pytest.mark.parametrize(
    "odd", [None, 3, "x", [], [[]], {}, {"a": []}, {"a": {"targets": 1, "weights": {}}}], ids=str
)
def test_settings_of_other_kinds_say_nothing(odd: object) -> None:
    odd_group = {"a": {"targets": ["Linear"], "weights": {"num_bits": odd, "group_size": odd, "type": odd}}}
    for method in ("modelopt", "compressed-tensors", "gptq"):
        for groups in (odd, odd_group):
            keys = (
                "ignore",
                "exclude_modules",
                "quantized_layers",
                "quant_algo",
                "format",
                "bits",
                "extra_config",
            )
            told = {"quant_method": method, "config_groups": groups, **dict.fromkeys(keys, odd)}
            settings = QuantizationSettings(told)
            settings.of("model.layers.0.mlp.up_proj")
            assert settings.bits_of("model.layers.0.mlp.up_proj") in (None, 3)
            assert settings.named <= {"a"}
