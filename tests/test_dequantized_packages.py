"""Weights that quantizing packages store become plain ones: compressed-tensors, AWQ, GPTQ, bitsandbytes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard.base.errors import ReshardError
from tests.environments import python
from tests.genuine import quantized
from tests.judges import assert_same_tensors, tensors_of

Models = Callable[..., Path]
Tensors = dict[str, torch.Tensor]


# ------------------------------------------------------------------------------------------------ compressed-tensors


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["FP8", "FP8_DYNAMIC", "W8A8", "W4A16"])
def test_as_compressed_tensors_decompresses(kind: str, hf_model: Models, tmp_path: Path) -> None:
    plain, source = hf_model("qwen3", dtype="bfloat16"), tmp_path / "source"
    make = [python("quantizers"), "-m", "tests.genuine.make_quantized"]
    subprocess.run([*make, kind, plain, source], check=True)
    subprocess.run([*make, "plain", source, tmp_path / "expected.safetensors"], check=True)
    reshard.convert(source, tmp_path / "out", to="huggingface", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "out", load_file(tmp_path / "expected.safetensors"))
    reshard.convert(source, tmp_path / "native", to="megatron", tp=2)
    assert reshard.verify(source, tmp_path / "native").equal


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["channel", "group", "weight"])
def test_as_compressed_tensors_unpacks_four_bits(kind: str, hf_model: Models, tmp_path: Path) -> None:
    """A scale for each row, and columns in the order of their activations."""
    make = [python("compressed-tensors-0.12"), "-m", "tests.genuine.make_packed_int4", kind]
    paths = [hf_model("qwen3", dtype="bfloat16"), tmp_path / "source", tmp_path / "expected.safetensors"]
    subprocess.run([*make, *paths], check=True)
    reshard.convert(tmp_path / "source", tmp_path / "out", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "out", load_file(tmp_path / "expected.safetensors"))
    reshard.convert(tmp_path / "source", tmp_path / "native", to="megatron", tp=2)
    assert reshard.verify(tmp_path / "source", tmp_path / "native").equal


def four_bits(plain: Path, out: Path, method: str, bits: int = 4) -> Tensors:
    """A folder whose projections are random values of `bits`, packed as by `method`, and the corresponding weights."""
    draw = torch.Generator().manual_seed(0)
    stored: Tensors = {}
    weights: Tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = weights[name] = tensor
            continue
        columns, rows = tensor.shape
        module, groups = name.removesuffix("weight"), rows // 16
        values = torch.randint(0, 1 << bits, (rows, columns), generator=draw)
        less = int(method in ("gptq", "auto_round:auto_gptq"))  # which takes 1 off a zero point
        zeros = torch.randint(less, (1 << bits) + less, (groups, columns), generator=draw)
        scales = (torch.rand(groups, columns, generator=draw) / 100).half()
        g_idx = torch.arange(rows) // 16
        if method == "awq":
            order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
            packed, points = packed_along(values, 1, order), packed_along(zeros, 1, order)
        else:
            g_idx = g_idx[torch.randperm(rows, generator=draw)]
            packed, points = packed_along(values, 0, None, bits), packed_along(zeros - less, 1, None, bits)
            stored[f"{module}g_idx"] = g_idx.int()
            stored[f"{module}bias"] = torch.zeros(columns, dtype=torch.float16)
        stored |= {f"{module}qweight": packed, f"{module}qzeros": points, f"{module}scales": scales}
        weights[name] = ((values - zeros[g_idx]) * scales[g_idx]).T.contiguous()
    told = {"quant_method": method, "bits": bits, "group_size": 16}
    if method.startswith("auto_round"):
        told |= {"quant_method": "auto-round", "packing_format": method}
    if method == "gptq_v2":
        told |= {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
    quantized.with_tensors(plain, out, stored, told)
    return weights


def packed_along(
    values: torch.Tensor, axis: int, order: torch.Tensor | None = None, bits: int = 4
) -> torch.Tensor:
    """Values of some bits in 32-bit items, the first in the lowest bits unless `order` differs, without gaps."""
    parts = values.movedim(axis, -1) & ((1 << bits) - 1)
    parts = parts if order is None else parts.unflatten(-1, (-1, 8))[..., order].flatten(-2)
    stream = (parts[..., None] >> torch.arange(bits) & 1).flatten(-2).unflatten(-1, (-1, 32))
    items = (stream << torch.arange(32)).sum(-1)
    return torch.where(items >= 1 << 31, items - (1 << 32), items).int().movedim(-1, axis).contiguous()


@pytest.mark.parametrize("method", ["awq", "gptq_v2", "gptq"])
def test_four_bits_with_zero_points(method: str, hf_model: Models, tmp_path: Path) -> None:
    source = tmp_path / "source"
    expected = four_bits(hf_model("qwen3", dtype="float16"), source, method)
    reshard.convert(source, tmp_path / "native", to="megatron", tp=2)
    reshard.convert(tmp_path / "native", tmp_path / "out")
    assert_same_tensors(tensors_of(tmp_path / "out"), expected)
    assert reshard.verify(source, tmp_path / "out").equal


@pytest.mark.parametrize("memory", [None, "24MiB"])
@pytest.mark.parametrize("bits", [2, 3, 5, 8])
@pytest.mark.parametrize("method", ["gptq", "auto_round:auto_gptq", "auto_round"])
@pytest.mark.core("gptq-3-None", "auto_round:auto_gptq-8-None", "auto_round-5-None")
def test_other_bits_with_zero_points(
    method: str, bits: int, memory: str | None, hf_model: Models, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    expected = four_bits(hf_model("qwen3", dtype="float16"), source, method, bits)
    limit = {"memory": memory} if memory else {}
    reshard.convert(source, tmp_path / "native", to="megatron", tp=2, **limit)
    reshard.convert(tmp_path / "native", tmp_path / "out")
    assert_same_tensors(tensors_of(tmp_path / "out"), expected)
    assert reshard.verify(source, tmp_path / "out").equal


def test_bits_that_are_not_those_of_the_config(hf_model: Models, tmp_path: Path) -> None:
    source, told = tmp_path / "source", tmp_path / "source" / "config.json"
    four_bits(hf_model("qwen3", dtype="float16"), source, "auto_round", 3)
    config = json.loads(told.read_text())
    own = {"model.layers.1.mlp.up_proj": {"bits": 2}}
    for settings, count in (({"bits": 8}, 7), ({"extra_config": own}, 1)):
        changed = {**config, "quantization_config": {**config["quantization_config"], **settings}}
        told.write_text(json.dumps(changed))
        with pytest.raises(ReshardError, match="not stored as its quantization_config says") as raised:
            reshard.convert(source, tmp_path / "out", to="megatron")
        assert len(raised.value.problems) == count


def test_biases_that_gptq_adds_must_be_zeros(hf_model: Models, tmp_path: Path) -> None:
    source = tmp_path / "source"
    four_bits(hf_model("qwen3", dtype="float16"), source, "gptq")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.bias"][3] = 1
    quantized.save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ReshardError, match="different values"):
        reshard.convert(source, tmp_path / "out", to="megatron")


def test_a_group_that_is_not_there(hf_model: Models, tmp_path: Path) -> None:
    source = tmp_path / "source"
    four_bits(hf_model("qwen3", dtype="float16"), source, "gptq")
    tensors = load_file(source / "model.safetensors")
    for number in (-1, 4):
        tensors["model.layers.1.self_attn.q_proj.g_idx"][3] = number
        quantized.save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ReshardError, match="a group that has no scale"):
            reshard.convert(source, tmp_path / "out", to="megatron")


def looked_up(plain: Path, out: Path, *, nested: bool, **changed: object) -> Tensors:
    """A folder with 4-bit weights as bitsandbytes stores them, and the corresponding weights."""
    draw = torch.Generator().manual_seed(0)
    stored: Tensors = {}
    weights: Tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = weights[name] = tensor
            continue
        count = tensor.numel()
        codes, table = torch.randint(0, 16, (count,), generator=draw), torch.randn(16, generator=draw)
        absmax = torch.rand(-(-count // 32), generator=draw)
        state = {"quant_type": "nf4", "blocksize": 32, "dtype": "bfloat16", "shape": list(tensor.shape)}
        if nested:
            indices = torch.randint(0, 256, absmax.shape, generator=draw)
            outer, entries = (
                torch.rand(-(-absmax.numel() // 50), generator=draw),
                torch.randn(256, generator=draw),
            )
            absmax = entries[indices] * outer.repeat_interleave(50)[: absmax.numel()] + torch.tensor(0.25)
            stored |= {f"{name}.nested_absmax": outer, f"{name}.nested_quant_map": entries}
            state |= {"nested_blocksize": 50, "nested_offset": 0.25}
        blob = torch.tensor(list(json.dumps(state | changed).encode()), dtype=torch.uint8)
        stored |= {
            name: (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
            f"{name}.absmax": indices.to(torch.uint8) if nested else absmax,
            f"{name}.quant_map": table,
            f"{name}.quant_state.bitsandbytes__nf4": blob,
        }
        values = table[codes] * absmax.repeat_interleave(32)[:count]
        weights[name] = values.to(torch.bfloat16).reshape(tensor.shape)
    told = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    quantized.with_tensors(plain, out, stored, told)
    return weights


@pytest.mark.parametrize("nested", [True, False])
def test_four_bits_of_a_table(nested: bool, hf_model: Models, tmp_path: Path) -> None:
    source = tmp_path / "source"
    expected = looked_up(hf_model("qwen3", dtype="bfloat16"), source, nested=nested)
    reshard.convert(source, tmp_path / "native", to="megatron", tp=2)
    plan = reshard.convert(tmp_path / "native", tmp_path / "out").plan
    assert_same_tensors(tensors_of(tmp_path / "out"), expected)
    assert "quantization data" not in plan.dropped
    assert reshard.verify(source, tmp_path / "out").equal


@pytest.mark.parametrize(
    "changed",
    [
        {"shape": [3]},
        {"shape": None},
        {"shape": ["2", "3"]},
        {"blocksize": 0},
        {"blocksize": 48},
        {"shape": []},
    ],
    ids=str,
)
def test_a_state_that_is_not_of_the_weight(
    changed: dict[str, object], hf_model: Models, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    looked_up(hf_model("qwen3", dtype="bfloat16"), source, nested=False, **changed)
    with pytest.raises(ReshardError, match="do not match it"):
        reshard.convert(source, tmp_path / "out", to="megatron")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"][:] = ord("[")
    quantized.save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ReshardError, match=r"cannot be read|do not tell"):
        reshard.convert(source, tmp_path / "out", to="megatron")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["awq", "gptq", "gptq desc_act"])
def test_as_their_packages_unpack_four_bits(kind: str, hf_model: Models, tmp_path: Path) -> None:
    plain, source = hf_model("qwen3", dtype="float16"), tmp_path / "source"
    make = [python("quantizers"), "-m", "tests.genuine.make_quantized"]
    kind, _, shuffled = kind.partition(" ")
    subprocess.run([*make, kind, plain, source], check=True)
    if shuffled:
        tensors = load_file(source / "model.safetensors")
        for name in [name for name in tensors if name.endswith("g_idx")]:
            tensors[name] = tensors[name][torch.randperm(tensors[name].numel())]
        quantized.save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    subprocess.run([*make, f"{kind}-plain", source, tmp_path / "expected.safetensors"], check=True)
    expected = load_file(tmp_path / "expected.safetensors")
    reshard.convert(source, tmp_path / "native", to="megatron", tp=2)
    reshard.convert(tmp_path / "native", tmp_path / "out")
    assert_same_tensors(tensors_of(tmp_path / "out"), expected)
    assert reshard.verify(source, tmp_path / "native").equal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *[(f"auto_round-{bits}", "qwen3") for bits in (2, 3, 8)],
        *[(f"auto_round-{bits}-asym", "qwen3_tied") for bits in (2, 3, 5)],
        *[(f"auto_gptq-{bits}", "qwen3") for bits in (2, 3, 8)],
        ("auto_round-3", "qwen3_moe"),
    ],
)
def test_as_auto_round_unpacks_other_bits(kind: str, name: str, hf_model: Models, tmp_path: Path) -> None:
    """What auto-round itself saves, and the weights that its layers multiply with, in float16."""
    plain, source = hf_model(name, dtype="bfloat16"), tmp_path / "source"
    make = [python("quantizers"), "-m", "tests.genuine.make_quantized"]
    subprocess.run([*make, kind, plain, source], check=True)
    subprocess.run([*make, "gptq-plain", source, tmp_path / "expected.safetensors"], check=True)
    expected = load_file(tmp_path / "expected.safetensors")
    reshard.convert(source, tmp_path / "native", to="megatron", tp=2)
    reshard.convert(tmp_path / "native", tmp_path / "out", dtype="float16")
    assert_same_tensors(
        tensors_of(tmp_path / "out"), {each: tensor.to(torch.float16) for each, tensor in expected.items()}
    )
    assert reshard.verify(source, tmp_path / "native").equal


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_as_bitsandbytes_dequantizes(kind: str, hf_model: Models, tmp_path: Path) -> None:
    """Its CPU kernel needs rows of complete blocks of 64; others, and GPUs, process the blocks one by one."""
    plain, source = hf_model("qwen3", dtype="bfloat16", intermediate_size=128), tmp_path / "source"
    make = [python("quantizers"), "-m", "tests.genuine.make_quantized"]
    subprocess.run([*make, kind, plain, source], check=True)
    subprocess.run([*make, f"{kind}-plain", source, tmp_path / "expected.safetensors"], check=True)
    reshard.convert(source, tmp_path / "native", to="megatron", tp=2)
    reshard.convert(tmp_path / "native", tmp_path / "out")
    assert_same_tensors(tensors_of(tmp_path / "out"), load_file(tmp_path / "expected.safetensors"))
    assert reshard.verify(source, tmp_path / "native").equal


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["W4A16_ASYM", "W3A16"])
def test_what_is_not_computed_is_refused(kind: str, hf_model: Models, tmp_path: Path) -> None:
    source = tmp_path / "source"
    make = [python("quantizers"), "-m", "tests.genuine.make_quantized"]
    subprocess.run([*make, kind, hf_model("qwen3", dtype="bfloat16"), source], check=True)
    with pytest.raises(ReshardError, match="quantized"):
        reshard.convert(source, tmp_path / "out", to="megatron")
    assert reshard.inspect(source).next == ""


def described(weights: dict[str, object], kind: str) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8}


def with_int4(
    plain: Path, out: Path, told: dict[str, object], wide: int = 8, *, reordered: bool = False
) -> tuple[Path, Tensors]:
    """The experts in 4 bits, in groups of `wide` columns, and all plain weights of that model.

    Groups of 8 are as in Kimi-K2-Thinking; 0 stands for complete rows. If columns are `reordered`, `g_idx` has the
    group of each.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(plain / "model.safetensors")
    expected: Tensors = dict(tensors)
    for name in [name for name in tensors if ".mlp.experts." in name]:
        rows, columns = tensors.pop(name).shape
        each = wide or columns
        numbers = torch.randint(0, 16, (rows, columns), generator=generator)
        scales = (torch.rand(rows, columns // each, generator=generator) / 50).to(torch.bfloat16)
        groups = torch.arange(columns) // each
        if reordered:
            groups = groups[torch.randperm(columns, generator=generator)]
            tensors[f"{name}_g_idx"] = groups.int()
        shifts = torch.arange(8) * 4
        items = (numbers.view(rows, -1, 8) << shifts).sum(-1)
        tensors[f"{name}_packed"] = torch.where(items >= 1 << 31, items - (1 << 32), items).to(torch.int32)
        tensors[f"{name}_scale"] = scales
        tensors[f"{name}_shape"] = torch.tensor([rows, columns])
        expected[name] = (numbers - 8).to(torch.bfloat16) * scales[:, groups]
    return quantized.with_tensors(plain, out, tensors, told), expected


def test_int4_experts_become_plain(hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("deepseek_v3_mtp", dtype="bfloat16")
    source, expected = with_int4(plain, tmp_path / "source", described(INT4, "pack-quantized"))
    reshard.convert(source, tmp_path / "native", to="megatron", tp=2, pp=2, ep=2)
    assert reshard.verify(source, tmp_path / "native").equal
    reshard.convert(tmp_path / "native", tmp_path / "out")
    quantized.assert_holds(tmp_path / "out", expected)


CHANNEL = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None}


@pytest.mark.core("actorder group-None")
@pytest.mark.parametrize("memory", [None, "24MiB"])
@pytest.mark.parametrize(
    ("settings", "wide", "reordered"),
    [
        (CHANNEL, 0, False),
        ({**INT4, "actorder": "group"}, 8, True),
        ({**INT4, "actorder": "weight"}, 8, False),
    ],
    ids=["per channel", "actorder group", "actorder weight"],
)
def test_other_schemes_of_int4_become_plain(
    settings: dict[str, object],
    wide: int,
    reordered: bool,
    memory: str | None,
    hf_model: Models,
    tmp_path: Path,
) -> None:
    told = described(settings, "pack-quantized")
    plain = hf_model("qwen3_moe", dtype="bfloat16")
    source, expected = with_int4(plain, tmp_path / "source", told, wide, reordered=reordered)
    limit = {"memory": memory} if memory else {}
    reshard.convert(source, tmp_path / "out", dtype="bfloat16", **limit)
    quantized.assert_holds(tmp_path / "out", expected)
    reshard.convert(source, tmp_path / "native", to="megatron", tp=2, etp=2, **limit)
    assert reshard.verify(source, tmp_path / "native").equal
    assert reshard.verify(source, tmp_path / "native", proof=True)


def test_groups_that_say_that_columns_are_in_order(hf_model: Models, tmp_path: Path) -> None:
    """compressed-tensors fills them with -1."""
    told = described({**INT4, "actorder": "group"}, "pack-quantized")
    source, expected = with_int4(hf_model("qwen3_moe", dtype="bfloat16"), tmp_path / "source", told)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_packed")]:
        columns = tensors[name].shape[1] * 8
        tensors[f"{name.removesuffix('_packed')}_g_idx"] = torch.full((columns,), -1, dtype=torch.int32)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    reshard.convert(source, tmp_path / "out", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "out", expected)


def test_a_group_of_a_column_that_has_no_scale(hf_model: Models, tmp_path: Path) -> None:
    told = described({**INT4, "actorder": "group"}, "pack-quantized")
    plain = hf_model("qwen3_moe", dtype="bfloat16")
    source, _ = with_int4(plain, tmp_path / "source", told, reordered=True)
    tensors = load_file(source / "model.safetensors")
    next(tensor for name, tensor in tensors.items() if name.endswith("_g_idx"))[0] = 99
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ReshardError, match="group"):
        reshard.convert(source, tmp_path / "out", dtype="bfloat16")
    assert not (tmp_path / "out").exists()


UNKNOWN = {
    "a zero point": {**INT4, "symmetric": False},
    "three bits": {**INT4, "num_bits": 3},
    "another group": {**INT4, "group_size": 16},
    "floats": {**INT4, "type": "float"},
    "a scale for each row": CHANNEL,
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_other_packed_numbers_are_refused(case: str, hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("qwen3_moe", dtype="bfloat16")
    source, _ = with_int4(plain, tmp_path / "source", described(UNKNOWN[case], "pack-quantized"))
    for options in ({"to": "megatron"}, {"to": "huggingface", "dtype": "bfloat16"}):
        with pytest.raises(ReshardError, match="quantized"):
            reshard.convert(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_fp8_of_compressed_tensors_becomes_plain(per: str, hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("qwen3", dtype="bfloat16")
    tensors = load_file(plain / "model.safetensors")
    expected: Tensors = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows = tensors[name].float()
        scale = rows.abs().amax(1, keepdim=True) if per == "channel" else rows.abs().max().reshape(1)
        scale = (scale / 448).to(torch.bfloat16)
        tensors |= {name: (rows / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
        expected[name] = tensors[name].to(torch.bfloat16) * scale
    told = described({"num_bits": 8, "type": "float", "strategy": per}, "float-quantized")
    source = quantized.with_tensors(plain, tmp_path / "source", tensors, told)
    reshard.convert(source, tmp_path / "out", to="huggingface", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "out", expected)
    assert reshard.verify(source, tmp_path / "out").equal


def test_eight_bits_of_bitsandbytes(hf_model: Models, tmp_path: Path) -> None:
    """It divides by 127; if the config does not name it, only its name for scales shows that."""
    plain, name = hf_model("qwen3", dtype="bfloat16"), "model.layers.0.mlp.up_proj"
    tensors = load_file(plain / "model.safetensors")
    codes = (tensors[f"{name}.weight"].float() * 300).clamp(-127, 127).to(torch.int8)
    parts = {f"{name}.weight": codes, f"{name}.SCB": torch.rand(len(codes)) * 3}
    told = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    source = quantized.with_tensors(plain, tmp_path / "source", tensors | parts, told)
    reshard.convert(source, tmp_path / "out", to="huggingface", dtype="bfloat16")
    weight = codes * parts[f"{name}.SCB"][:, None] * 7.874015718698502e-3
    expected = tensors | {f"{name}.weight": weight.to(torch.bfloat16)}
    assert_same_tensors(tensors_of(tmp_path / "out"), expected)
    untold = quantized.with_tensors(plain, tmp_path / "untold", tensors | parts, None)
    with pytest.raises(ReshardError, match="the weights are quantized"):
        reshard.convert(untold, tmp_path / "native", to="megatron")
