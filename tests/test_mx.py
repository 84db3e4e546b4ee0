"""MXFP4, MXFP6 and MXFP8 of compressed-tensors: groups of 32 small floats that share an exponent."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard.base.errors import ReshardError
from reshard.model.quantizer import STORAGES
from tests.commandline import reshard as command
from tests.environments import python
from tests.genuine import quantized
from tests.judges import assert_same_tensors, tensors_of
from tests.test_quantizing_int4 import odd_weights, read

Models = Callable[..., Path]
Tensors = dict[str, torch.Tensor]
KINDS = {"MXFP4": 4, "MXFP6": 6, "MXFP8": 8}
FORMATS = {4: "mxfp4-pack-quantized", 6: "mxfp6-pack-quantized", 8: "mxfp8-quantized"}


def group_of(bits: int, targets: list[str]) -> dict[str, Any]:
    args = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    weights = {**args, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8", "dynamic": False}
    return {"targets": targets, "weights": weights, "format": FORMATS[bits]}


def told(*groups: dict[str, Any]) -> dict[str, Any]:
    kinds = {group["format"] for group in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
        "config_groups": {f"group_{at}": group for at, group in enumerate(groups)},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }


def with_mx(
    plain: Path, out: Path, bits_of: Callable[[str], int], settings: dict[str, Any], *, low: int = 0
) -> Path:
    """A folder whose projections are random codes, with exponents `low` to 254 - `low`; 255 is not a number."""
    draw = torch.Generator().manual_seed(0)
    tensors = load_file(plain / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors.pop(name).shape
        bits = bits_of(name)
        codes = torch.randint(0, 256, (rows, columns * bits // 8), generator=draw).to(torch.uint8)
        scales = torch.randint(low, 255 - low, (rows, columns // 32), generator=draw).to(torch.uint8)
        codes[(codes & 127 == 127) & (bits == 8)] = 0  # not NaN, of which there are many
        packed = name if bits == 8 else f"{name}_packed"
        tensors |= {packed: codes.view(torch.float8_e4m3fn) if bits == 8 else codes, f"{name}_scale": scales}
    return quantized.with_tensors(plain, out, tensors, settings)


def by_formula(source: Path) -> Tensors:
    """All weights, of codes that are spread to their bits, and these to numbers."""
    made = {}
    stored = load_file(source / "model.safetensors")
    for name, tensor in stored.items():
        if name.endswith("_scale"):
            weight = name.removesuffix("_scale")
            codes = stored.get(f"{weight}_packed", stored.get(weight)).view(torch.uint8)
            bits = codes.shape[1] * 8 // (tensor.shape[1] * 32)
            stream = (codes[..., None] >> torch.arange(8) & 1).flatten(1).unflatten(1, (-1, bits))
            numbers = (stream << torch.arange(bits)).sum(-1)
            values = FLOATS[bits](numbers)
            powers = torch.exp2(tensor.double() - 127).repeat_interleave(32, 1)
            made[weight] = (values.double() * powers).to(torch.bfloat16)
        elif f"{name.removesuffix('_packed')}_scale" not in stored:
            made[name] = tensor
    return made


def small(numbers: torch.Tensor, mantissa: int, exponent: int) -> torch.Tensor:
    """Floats without NaN and Inf, whose exponents have the bias 1."""
    fraction = (numbers & (1 << mantissa) - 1).double() / (1 << mantissa)
    power = numbers >> mantissa & (1 << exponent) - 1
    magnitude = torch.where(power > 0, (1 + fraction) * 2.0 ** (power - 1), fraction)
    return torch.where(numbers >> mantissa + exponent > 0, -magnitude, magnitude)


FLOATS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    4: lambda numbers: small(numbers, 1, 2),
    6: lambda numbers: small(numbers, 3, 2),
    8: lambda numbers: numbers.to(torch.uint8).view(torch.float8_e4m3fn).float(),
}


# ------------------------------------------------------------------------------------------------ the package


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("kind", [f"{kind}A16" for kind in KINDS])
def test_as_compressed_tensors_decompresses(kind: str, name: str, hf_model: Models, tmp_path: Path) -> None:
    """What llm-compressor makes with it."""
    plain, source = hf_model(name, dtype="bfloat16"), tmp_path / "source"
    make = [python("llm-compressor"), "-m", "tests.genuine.make_nvfp4", kind]
    subprocess.run([*make, plain, source, tmp_path / "expected.safetensors"], check=True)
    reshard.convert(source, tmp_path / "out", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "out", load_file(tmp_path / "expected.safetensors"))
    reshard.convert(source, tmp_path / "native", to="megatron", tp=2)
    assert reshard.verify(source, tmp_path / "native").equal


@pytest.mark.slow
@pytest.mark.parametrize("bits", KINDS.values())
def test_every_code_and_every_exponent(bits: int, hf_model: Models, tmp_path: Path) -> None:
    source = with_mx(
        hf_model("qwen3", dtype="bfloat16"),
        tmp_path / "source",
        lambda name: bits,
        told(group_of(bits, ["Linear"])),
    )
    make = [python("llm-compressor"), "-m", "tests.genuine.make_nvfp4", "plain"]
    subprocess.run([*make, source, tmp_path / "expected.safetensors"], check=True)
    reshard.convert(source, tmp_path / "out", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "out", load_file(tmp_path / "expected.safetensors"))


# ------------------------------------------------------------------------------------------------ the formulas


@pytest.mark.core("6-24MiB")
@pytest.mark.parametrize("memory", [None, "24MiB"])
@pytest.mark.parametrize("bits", KINDS.values())
def test_groups_of_32_become_plain(bits: int, memory: str | None, hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("qwen3_moe", dtype="bfloat16")
    source = with_mx(plain, tmp_path / "source", lambda name: bits, told(group_of(bits, ["Linear"])), low=100)
    limit = {"memory": memory} if memory else {}
    reshard.convert(source, tmp_path / "out", dtype="bfloat16", **limit)
    expected = by_formula(source)
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(tensor.isnan(), expected[name].isnan()), name
        assert torch.equal(tensor.nan_to_num(), expected[name].nan_to_num()), name
    reshard.convert(source, tmp_path / "native", to="megatron", tp=2, etp=2, **limit)
    assert reshard.verify(source, tmp_path / "native", proof=True)
    assert reshard.open(source).checkpoint.parameters == reshard.open(plain).checkpoint.parameters


def test_groups_of_several_kinds(hf_model: Models, tmp_path: Path) -> None:
    """Each weight by what is stored, and named with how many are."""
    groups = [group_of(6, ["re:.*self_attn.*_proj$"]), group_of(4, [r"re:.*mlp.*_proj$"])]
    source = with_mx(
        hf_model("qwen3", dtype="bfloat16"),
        tmp_path / "source",
        lambda name: 6 if "self_attn" in name else 4,
        told(*groups),
        low=100,
    )
    reshard.convert(source, tmp_path / "out", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "out", by_formula(source))
    shown = " ".join(command("inspect", source).out.split())
    assert "16 weights in MXFP6" in shown and "12 weights in MXFP4" in shown
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = told(group_of(4, ["Linear"]))
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ReshardError, match="not stored as its quantization_config says") as raised:
        reshard.convert(source, tmp_path / "other", dtype="bfloat16")
    assert all("self_attn" in str(each.tensor) for each in raised.value.problems)


@pytest.mark.parametrize("bits", KINDS.values())
def test_groups_of_another_size_are_refused(bits: int, hf_model: Models, tmp_path: Path) -> None:
    settings = told(group_of(bits, ["Linear"]))
    settings["config_groups"]["group_0"]["weights"]["group_size"] = 64
    source = with_mx(
        hf_model("qwen3", dtype="bfloat16"), tmp_path / "source", lambda name: bits, settings, low=100
    )
    with pytest.raises(ReshardError):
        reshard.convert(source, tmp_path / "out", dtype="bfloat16")
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------ written


@pytest.mark.slow
@pytest.mark.parametrize("how", ["mxfp6", "mxfp8"])
def test_written_as_llm_compressor_writes_it(how: str, hf_model: Models, tmp_path: Path) -> None:
    plain, theirs, out = hf_model("qwen3_moe", dtype="bfloat16"), tmp_path / "theirs", tmp_path / "out"
    make = [python("llm-compressor"), "-m", "tests.genuine.make_nvfp4", f"{how.upper()}A16"]
    subprocess.run([*make, plain, theirs, tmp_path / "expected.safetensors"], check=True)
    plan = reshard.convert(plain, out, quantize=how, max_shard_size="50kB").plan
    found = tensors_of(out)
    assert_same_tensors(found, tensors_of(theirs))
    chosen = [name for name in found if name.endswith("_scale")]
    assert f"{len(chosen)} weights are quantized to {how}" in plan.notes
    subprocess.run([*make[:-1], "plain", out, tmp_path / "read.safetensors"], check=True)
    assert_same_tensors(
        load_file(tmp_path / "read.safetensors"), load_file(tmp_path / "expected.safetensors")
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["mxfp6", "mxfp8"])
def test_odd_weights_as_compressed_tensors_compresses_them(how: str, tmp_path: Path) -> None:
    weights = {name: each for name, each in odd_weights().items() if each.dtype != torch.float16}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    make = [python("llm-compressor"), "-m", "tests.genuine.make_nvfp4", f"compress-{how.upper()}A16"]
    subprocess.run([*make, tmp_path / "model.safetensors", tmp_path / "expected.safetensors"], check=True)
    expected, storage = load_file(tmp_path / "expected.safetensors"), STORAGES[how]
    assert len(expected) == 2 * len(weights)
    for name, tensor in reshard.open(tmp_path).tensors.items():
        for part, role in zip(storage.parts(name, tensor), storage.roles, strict=True):
            found, wanted = read(part), expected[name.removesuffix("weight") + role.format("weight")]
            assert found.shape == tuple(wanted.shape)
            np.testing.assert_array_equal(
                found.view(np.uint8), quantized.bits(wanted).reshape(found.shape), err_msg=name
            )


@pytest.mark.parametrize("how", ["mxfp6", "mxfp8"])
def test_quantized_twice_it_keeps_its_values(how: str, hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("qwen3_moe", dtype="bfloat16")
    reshard.convert(plain, tmp_path / "one", quantize=how, memory="24MiB")
    reshard.convert(tmp_path / "one", tmp_path / "native", to="megatron", tp=2, etp=2)
    reshard.convert(tmp_path / "native", tmp_path / "two", quantize=how)
    for number in ("one", "two"):
        reshard.convert(tmp_path / number, tmp_path / f"plain-{number}", dtype="bfloat16")
    first = tensors_of(tmp_path / "plain-one")
    if how == "mxfp6":  # in MXFP8, a group whose largest value is 448 gets a scale twice as large
        assert_same_tensors(tensors_of(tmp_path / "plain-two"), first)
    for name, tensor in tensors_of(plain).items():
        off = (tensor.float() - first[name].float()).abs()
        assert (off <= tensor.float().abs().max() / 14).all(), name
    found = command("inspect", tmp_path / "one", "--json").json
    assert found["parameters"] == reshard.open(plain).checkpoint.parameters


def test_rows_that_are_no_multiple_of_32(hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("qwen3", dtype="bfloat16", intermediate_size=80)
    with pytest.raises(ReshardError, match="not divisible into blocks"):
        reshard.convert(plain, tmp_path / "out", quantize="mxfp8")
