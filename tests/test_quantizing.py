"""Quantizing plain weights: bit for bit like the common quantizers, and loadable where theirs are."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear, Fp8Quantize
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import reshard
from reshard.algebra.tensors import Tensor
from reshard.base.errors import ReshardError
from reshard.model.quantizer import STORAGES
from reshard.transfer.gather import Gatherer
from reshard.transfer.thread_files import OpenFiles
from tests.commandline import reshard as command
from tests.environments import python
from tests.genuine import peft, quantized
from tests.judges import assert_merged, assert_same_tensors, tensors_of
from tests.test_dequantized import assert_as_transformers, published, unpacked

Models = Callable[..., Path]
Tensors = dict[str, torch.Tensor]


def settings(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def fp8_by_transformers(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales as transformers makes them; blocks at the edges are padded with zeros, as it cannot do."""
    how = FineGrainedFP8Config(scale_fmt="ue8m0" if kind == "fp8-ue8m0" else "float")
    rows, columns = weight.shape[-2:]
    padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    made = Fp8Quantize(SimpleNamespace(quantization_config=how)).convert({"weight": padded})
    return made["weight"][..., :rows, :columns], made["weight_scale_inv"].float()


def mxfp4_by_formula(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of experts [expert, in, out], as triton_kernels documents its rounding.

    The scale is the least power of two that brings the largest to 6 or below; to the nearest value, ties to even.
    """
    groups = weight.to(torch.bfloat16).double().transpose(1, 2).unflatten(2, (-1, 32))
    largest = groups.abs().amax(3)
    exponents = torch.log2(largest / 6).ceil().clamp(min=-127)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    scaled = groups / torch.exp2(exponents)[..., None]
    gaps = (scaled.abs()[..., None] - values).abs()
    even = torch.arange(8) % 2 * 1e-9  # of two values as near, the even one
    codes = (gaps + even).argmin(-1) + 8 * groups.signbit()
    packed = codes[..., 0::2] + 16 * codes[..., 1::2]
    return packed.to(torch.uint8), (exponents + 127).to(torch.uint8)


def assert_quantized(folder: Path, plain: Tensors, kind: str) -> set[str]:
    """Assert that a folder has the reference's quantized weights, which it returns, and the others unchanged."""
    found, chosen = tensors_of(folder), set()
    expected: Tensors = {}
    for name, tensor in plain.items():
        if kind == "mxfp4" and f"{name}_blocks" in found:
            expected[f"{name}_blocks"], expected[f"{name}_scales"] = mxfp4_by_formula(tensor)
        elif f"{name}_scale_inv" in found:
            expected[name], expected[f"{name}_scale_inv"] = fp8_by_transformers(tensor, kind)
        else:
            expected[name] = tensor
            continue
        chosen.add(name)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        np.testing.assert_array_equal(quantized.bits(found[name]), quantized.bits(tensor), err_msg=name)
    return chosen


# ------------------------------------------------------------------------------------------------ FP8


WHOLE = {"qk_nope_head_dim": 24, "v_head_dim": 8}
"""Sizes of deepseek_v3 without a smaller block: transformers finds the block size by dividing."""

MODELS: dict[str, dict[str, int]] = {"qwen3_tied": {}, "qwen2_moe": {}, "deepseek_v3_mtp": WHOLE}


@pytest.mark.core("qwen3_tied-fp8", "qwen2_moe-fp8-ue8m0")
@pytest.mark.parametrize("kind", ["fp8", "fp8-ue8m0"])
@pytest.mark.parametrize("name", MODELS)
def test_fp8_is_what_transformers_makes(name: str, kind: str, hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model(name, dtype="bfloat16", **MODELS[name])
    out = tmp_path / "out"
    plan = reshard.convert(plain, out, quantize=kind, max_shard_size="100KB").plan
    chosen = assert_quantized(out, tensors_of(plain), kind)
    assert f"{len(chosen)} weights are quantized to {kind}" in plan.notes
    assert (
        plan.parameters
        == reshard.open(plain).checkpoint.parameters
        == reshard.open(out).checkpoint.parameters
    )
    assert settings(out).get("scale_fmt") == ("ue8m0" if kind == "fp8-ue8m0" else None)
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert_the_modules_that_transformers_replaces(out, chosen)
    reshard.convert(out, tmp_path / "plain", to="huggingface", dtype="bfloat16")
    assert_as_transformers(out, tmp_path / "plain")


def assert_the_modules_that_transformers_replaces(folder: Path, chosen: set[str]) -> None:
    """Assert that a GPU would find FP8 in all modules that transformers expects it in, and in no other."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    how = FineGrainedFP8Config(**{k: v for k, v in settings(folder).items() if k != "fmt"})
    FineGrainedFP8HfQuantizer(how, pre_quantized=True)._process_model_before_weight_loading(model)
    replaced = {name for name, module in model.named_modules() if isinstance(module, FP8Linear | FP8Experts)}
    layers = config.num_hidden_layers  # transformers drops those of multi-token prediction
    ours = {name.partition(".experts.")[0] + ".experts" if ".experts." in name else name for name in chosen}
    ours = {name.removesuffix(".weight") for name in ours if f".layers.{layers}." not in name}
    assert replaced == ours, (sorted(replaced - ours)[:4], sorted(ours - replaced)[:4])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["fp8", "fp8-ue8m0"])
def test_fp8_deepseek_with_mtp_through_megatron(kind: str, hf_model: Models, tmp_path: Path) -> None:
    """The scale of a bfloat16 weight can be recovered from its values, and so can the codes: the same bytes.

    With powers of two, values are exact in bfloat16. A block whose largest code was rounded down to 224 has half the
    scale afterwards, and codes twice as large: the same values, and then the same bytes.
    """
    plain = hf_model("deepseek_v3_mtp", dtype="bfloat16", **WHOLE)
    source, native, out, again = (tmp_path / name for name in ("source", "megatron", "out", "again"))
    reshard.convert(plain, source, quantize=kind)
    reshard.convert(source, native, to="megatron", tp=2, pp=2, ep=2)
    found = reshard.verify(source, native)
    assert found.equal
    assert not found.rounded
    reshard.convert(native, out, quantize=kind)
    if kind == "fp8":
        assert_same_bits(tensors_of(out), tensors_of(source))
        assert command("verify", source, out).code == 0
    assert settings(out) == settings(source)
    assert_same_bits(published(out, (128, 128)), published(source, (128, 128)))
    reshard.convert(out, again, quantize=kind)
    assert_same_bits(tensors_of(again), tensors_of(out))
    reshard.convert(native, tmp_path / "plain")
    assert_as_transformers(out, tmp_path / "plain")


def test_blocks_at_the_edges(hf_model: Models, tmp_path: Path) -> None:
    """As in DeepSeek's kv_a_proj_with_mqa with 576 rows."""
    plain = hf_model("deepseek_v3", dtype="bfloat16", kv_lora_rank=200, qk_nope_head_dim=20)
    plan = reshard.convert(plain, tmp_path / "out", quantize="fp8").plan
    (note,) = [note for note in plan.notes if "transformers" in note]
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight" in note
    assert_quantized(tmp_path / "out", tensors_of(plain), "fp8")
    reshard.convert(tmp_path / "out", tmp_path / "plain", to="huggingface", dtype="bfloat16")
    assert_same_bits(tensors_of(tmp_path / "plain"), published(tmp_path / "out", (128, 128)))


def assert_same_bits(ours: Tensors, reference: Tensors) -> None:
    assert ours.keys() == reference.keys()
    for name, tensor in reference.items():
        np.testing.assert_array_equal(quantized.bits(ours[name]), quantized.bits(tensor), err_msg=name)


def of_many_kinds(shape: tuple[int, ...], dtype: torch.dtype, *, finite: bool = True) -> torch.Tensor:
    """Blocks of zeros, tiny and huge elements, negative zeros, and elements halfway between two codes."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator) * torch.logspace(-4, 2, shape[-1])
    flat = weight.view(-1, shape[-1])
    flat[:40, :130] = 0
    flat[3, 3] = -0.0
    flat[50:60, :40] = torch.linspace(-448, 448, 40)
    flat[60, :2] = torch.tensor([6.0, 1e-30 if dtype != torch.float16 else 1e-6])
    flat[61:, -5:] = torch.tensor([2.5, -3.5, 5, 0.25, 0.75])
    if not finite:
        flat[20, 5], flat[-1, -1] = float("nan"), -float("inf")
    return weight.to(dtype)


@pytest.mark.core(
    "fp8-(3, 150, 260)-nonfinite-torch.bfloat16",
    "fp8-ue8m0-(300, 200)-finite-torch.float16",
    "mxfp4-*-torch.bfloat16",
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("finite", [True, False], ids=["finite", "nonfinite"])
@pytest.mark.parametrize("shape", [(300, 200), (3, 150, 260), (256, 128)], ids=str)
@pytest.mark.parametrize("kind", ["fp8", "fp8-ue8m0", "mxfp4"])
def test_any_range_of_elements(
    kind: str, shape: tuple[int, ...], finite: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    if kind == "mxfp4":
        shape = (3, 96, 70)
    weight = of_many_kinds(shape, dtype, finite=finite)
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    storage, tensor = STORAGES[kind], reshard.open(tmp_path).tensors["weight"]
    parts = storage.parts("weight", tensor)
    if kind == "mxfp4" and not finite:
        with pytest.raises(ReshardError, match="a weight contains NaN or Inf"):
            read(parts[0], 0, parts[0].view.numel)
        return
    expected = mxfp4_by_formula(weight) if kind == "mxfp4" else fp8_by_transformers(weight, kind)
    for part, reference in zip(parts, expected, strict=True):
        assert part.shape == reference.shape
        raw = (
            reference.contiguous()
            .view(torch.uint8 if reference.itemsize == 1 else torch.int32)
            .flatten()
            .numpy()
        )
        raw = raw if reference.itemsize == 1 else np.where(np.isnan(raw.view(np.float32)), NAN, raw)
        for begin, end in [
            (0, len(raw)),
            *np.sort(np.random.default_rng(0).integers(0, len(raw) + 1, (40, 2))),
        ]:
            np.testing.assert_array_equal(read(part, int(begin), int(end)), raw[begin:end])


NAN = np.array(np.nan, np.float32).view(np.int32)


def read(tensor: Tensor, begin: int, end: int) -> np.ndarray[Any, Any]:
    with closing(OpenFiles()) as files:
        return Gatherer(files, None).read(tensor, begin, end)


def test_nan_and_inf_are_reported(hf_model: Models, tmp_path: Path) -> None:
    plain, name = hf_model("qwen3", dtype="bfloat16"), "model.layers.1.mlp.up_proj.weight"
    tensors = tensors_of(plain)
    tensors[name] = tensors[name].clone()
    tensors[name][3, 5] = float("inf")
    source = quantized.with_tensors(plain, tmp_path / "source", tensors, None)
    report = reshard.convert(source, tmp_path / "out", quantize="fp8").report
    assert report is not None
    assert report.nonfinite == [name, f"{name}_scale_inv"]
    with pytest.raises(ReshardError, match="NaN or Inf"):
        reshard.convert(source, tmp_path / "strict", quantize="fp8", strict=True)


def test_scales_that_are_not_of_bfloat16_move_once(hf_model: Models, tmp_path: Path) -> None:
    """Publishers scale weights that they have in float32. The values stay; the scales are rounded with the weights."""
    plain = hf_model("qwen3", dtype="bfloat16")
    tensors = {k: v.float() * 1.2345678 if v.ndim == 2 else v for k, v in tensors_of(plain).items()}
    first, second, third = tmp_path / "first", tmp_path / "second", tmp_path / "third"
    reshard.convert(quantized.with_tensors(plain, tmp_path / "plain", tensors, None), first, quantize="fp8")
    reshard.convert(first, second, quantize="fp8")
    reshard.convert(second, third, quantize="fp8")
    was, now = tensors_of(first), tensors_of(second)
    moved = {name for name in was if not np.array_equal(quantized.bits(was[name]), quantized.bits(now[name]))}
    assert moved
    assert all(name.endswith("_scale_inv") for name in moved)
    assert all(((was[name] / now[name]) - 1).abs().max() <= 2**-8 for name in moved)
    assert_same_bits(tensors_of(third), now)


@pytest.mark.parametrize("source", ["torch_dist", "dcp", "legacy"])
def test_from_any_format(source: str, hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("qwen3_moe", dtype="bfloat16")
    to = {"torch_dist": "megatron", "legacy": "megatron-legacy"}.get(source, source)
    layout = {} if source == "dcp" else {"tp": 2, "ep": 2}
    reshard.convert(plain, tmp_path / "native", to=to, **layout)
    reshard.convert(tmp_path / "native", tmp_path / "out", quantize="fp8")
    assert_quantized(tmp_path / "out", tensors_of(plain), "fp8")


def test_dtype_rounds_first(hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("qwen3")
    reshard.convert(plain, tmp_path / "half", quantize="fp8", dtype="bfloat16")
    halves = {name: tensor.bfloat16() for name, tensor in tensors_of(plain).items()}
    assert_quantized(tmp_path / "half", halves, "fp8")
    reshard.convert(plain, tmp_path / "full", quantize="fp8")
    assert_quantized(tmp_path / "full", tensors_of(plain), "fp8")


def test_a_quantized_source_is_quantized_anew(hf_model: Models, tmp_path: Path) -> None:
    source = quantized.fp8(hf_model("qwen3", dtype="bfloat16"), tmp_path / "source")
    plan = reshard.convert(source, tmp_path / "out", quantize="fp8").plan
    assert len([note for note in plan.notes if "quantized" in note]) == 2
    assert_quantized(tmp_path / "out", published(source, (16, 16)), "fp8")


# ------------------------------------------------------------------------------------------------ MXFP4


def test_mxfp4_experts_of_gpt_oss(hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("gpt_oss", dtype="bfloat16", hidden_size=64, intermediate_size=96)
    out = tmp_path / "out"
    plan = reshard.convert(plain, out, quantize="mxfp4").plan
    chosen = assert_quantized(out, tensors_of(plain), "mxfp4")
    assert all(name.endswith(("experts.gate_up_proj", "experts.down_proj")) for name in chosen)
    assert settings(out) == quantized.GPT_OSS
    assert (
        plan.parameters
        == reshard.open(plain).checkpoint.parameters
        == reshard.open(out).checkpoint.parameters
    )
    reshard.convert(out, tmp_path / "plain", to="huggingface", dtype="bfloat16")
    assert_as_transformers(out, tmp_path / "plain")
    reshard.convert(plain, tmp_path / "native", to="megatron", tp=2, pp=2, ep=2, etp=1)
    reshard.convert(tmp_path / "native", tmp_path / "again", quantize="mxfp4")
    assert_same_tensors(tensors_of(tmp_path / "again"), tensors_of(out))


def test_mxfp4_keeps_every_value_that_it_can_hold(hf_model: Models, tmp_path: Path) -> None:
    """Blocks whose largest code is 4 or 6 also keep their bytes; others were not scaled as far as possible."""
    source = quantized.mxfp4(hf_model("gpt_oss", dtype="bfloat16"), tmp_path / "source")
    reshard.convert(source, tmp_path / "native", to="megatron", tp=2, etp=1)
    reshard.convert(tmp_path / "native", tmp_path / "out", quantize="mxfp4")
    assert_same_tensors(unpacked(tmp_path / "out"), unpacked(source))
    was, now = tensors_of(source), tensors_of(tmp_path / "out")
    for name in [name for name in was if name.endswith("_blocks")]:
        magnitudes = torch.stack([was[name] & 7, was[name] >> 4 & 7]).amax((0, 4))
        stays = magnitudes >= 6
        assert stays.double().mean() > 0.5
        assert torch.equal(was[name][stays], now[name][stays])
    assert reshard.verify(source, tmp_path / "native").equal


@pytest.mark.slow
def test_mxfp4_is_what_torchao_makes(tmp_path: Path) -> None:
    weight = of_many_kinds((3, 96, 70), torch.bfloat16)
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    code = (
        "import sys; from safetensors.torch import load_file, save_file\n"
        "from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx\n"
        "import torch\n"
        "weight = load_file(sys.argv[1])['weight'].transpose(1, 2).contiguous()\n"
        "scales, blocks = to_mx(weight, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL)\n"
        "save_file({'blocks': blocks, 'scales': scales.view(torch.uint8)}, sys.argv[2])\n"
    )
    subprocess.run(
        [python("quantizers"), "-c", code, tmp_path / "model.safetensors", tmp_path / "made"], check=True
    )
    made = load_file(tmp_path / "made")
    parts = STORAGES["mxfp4"].parts("weight", reshard.open(tmp_path).tensors["weight"])
    for part, name in zip(parts, ("blocks", "scales"), strict=True):
        np.testing.assert_array_equal(read(part, 0, part.view.numel), made[name].flatten().numpy())


# ------------------------------------------------------------------------------------------------ adapters


@pytest.mark.parametrize("target", ["huggingface", "megatron"])
def test_an_adapter_merges_into_a_quantized_base(target: str, hf_model: Models, tmp_path: Path) -> None:
    base = quantized.fp8(hf_model("qwen3", dtype="bfloat16"), tmp_path / "base")
    adapter = peft.make_adapter(hf_model("qwen3"), tmp_path / "adapter", r=4, target_modules="all-linear")
    reshard.convert(base, tmp_path / "plain", to="huggingface", dtype="bfloat16")
    expected = peft.merged_by_peft(tmp_path / "plain", adapter, tmp_path / "expected", "bfloat16")
    layout = {"tp": 2} if target == "megatron" else {}
    reshard.convert(adapter, tmp_path / "merged", merge=True, base=base, to=target, **layout)
    merged = tmp_path / "merged"
    if target == "megatron":
        reshard.convert(tmp_path / "merged", tmp_path / "back")
        merged = tmp_path / "back"
    assert_merged(tensors_of(merged), tensors_of(expected))
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())


def test_a_merged_model_is_quantized(hf_model: Models, tmp_path: Path) -> None:
    base = quantized.fp8(hf_model("qwen3", dtype="bfloat16"), tmp_path / "base")
    adapter = peft.make_adapter(hf_model("qwen3"), tmp_path / "adapter", r=4, target_modules="all-linear")
    reshard.convert(adapter, tmp_path / "merged", merge=True, base=base)
    reshard.convert(adapter, tmp_path / "out", merge=True, base=base, quantize="fp8")
    assert_quantized(tmp_path / "out", tensors_of(tmp_path / "merged"), "fp8")


# ------------------------------------------------------------------------------------------------ verify, inspect


def test_verify_says_what_rounding_explains(hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("qwen3", dtype="bfloat16")
    reshard.convert(plain, tmp_path / "out", quantize="fp8")
    reshard.convert(plain, tmp_path / "native", to="megatron", tp=2)
    for other in (plain, tmp_path / "native"):
        found = reshard.verify(tmp_path / "out", other)
        assert found.equal
        assert len(found.rounded) == 28
        assert all(row.largest and row.largest < 0.05 for row in found.rounded)
    shown = command("verify", plain, tmp_path / "out")
    assert shown.code == 0
    assert "equal but for rounding" in " ".join(shown.out.split())
    assert len(command("verify", plain, tmp_path / "out", "--json").json["rounded"]) == 28

    tensors, name = load_file(tmp_path / "out" / "model.safetensors"), "model.layers.2.mlp.up_proj.weight"
    codes = tensors[name].view(torch.uint8).clone()
    codes[5, 5] ^= 1
    tensors[name] = codes.view(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    assert [(row.tensor, row.kind) for row in reshard.verify(plain, tmp_path / "out").rows] == [
        (name, "values")
    ]
    assert command("verify", plain, tmp_path / "out").code == 1


def test_verify_compares_two_kinds_of_quantization_by_value(hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("qwen3", dtype="bfloat16")
    first, second = tmp_path / "first", tmp_path / "second"
    reshard.convert(plain, first, quantize="fp8")
    reshard.convert(plain, second, quantize="fp8-ue8m0")
    found = reshard.verify(first, second)
    assert len(found.rows) > 20  # a scale may be a power of two by chance
    assert all(row.kind == "values" and row.largest and row.largest < 0.05 for row in found.rows)
    assert len([note for note in found.notes if "dequantized to float32" in note]) == 2
    config = json.loads((first / "config.json").read_text())
    config["quantization_config"].pop("modules_to_not_convert")
    (first / "config.json").write_text(json.dumps(config))
    reshard.convert(plain, tmp_path / "third", quantize="fp8")
    found = reshard.verify(first, tmp_path / "third")
    assert found.equal
    assert "compared as stored" in " ".join(found.notes)


def test_a_dry_run_shows_the_plan(hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("qwen3", dtype="bfloat16")
    words = ("convert", plain, tmp_path / "out", "--quantize", "fp8", "--json")
    shown = command(*words, "--dry-run")
    assert shown.code == 0
    assert not (tmp_path / "out").exists()
    assert command(*words).code == 0
    sizes = {file["path"]: file["bytes"] for file in shown.json["files"] if file["path"] != "reshard.json"}
    assert {name: (tmp_path / "out" / name).stat().st_size for name in sizes} == sizes
    found = command("inspect", tmp_path / "out", "--json").json
    assert found["parameters"] == shown.json["parameters"] == reshard.open(plain).checkpoint.parameters
    assert found["quantization"]["weights"] == 28


# ------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize("to", ["megatron", "megatron-legacy", "dcp", "deepspeed", "internlm"])
def test_other_targets_are_refused(to: str, hf_model: Models, tmp_path: Path) -> None:
    with pytest.raises(ReshardError) as refused:
        reshard.convert(hf_model("qwen3", dtype="bfloat16"), tmp_path / "out", to=to, quantize="fp8")
    (problem,) = refused.value.problems
    assert problem.message == "this format cannot store quantized weights"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "kind"), [("gpt_oss", "fp8"), ("qwen3", "mxfp4")])
def test_a_format_that_is_not_of_the_model(name: str, kind: str, hf_model: Models, tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match="not stored in this format"):
        reshard.convert(hf_model(name, dtype="bfloat16"), tmp_path / "out", quantize=kind)


def test_an_adapter_by_itself_is_refused(hf_model: Models, tmp_path: Path) -> None:
    adapter = peft.make_adapter(hf_model("qwen3"), tmp_path / "adapter", r=4, target_modules="all-linear")
    with pytest.raises(ReshardError, match="cannot store quantized weights"):
        reshard.convert(adapter, tmp_path / "out", to="peft", quantize="fp8")


def test_stacked_experts_are_refused_in_fp8(hf_model: Models, tmp_path: Path) -> None:
    """As in qwen3_vl_moe and llama4: transformers would use the values without their scales."""
    plain = hf_model("gpt_oss", dtype="bfloat16")
    source = shutil.copytree(plain, tmp_path / "source")
    config = json.loads((source / "config.json").read_text()) | {"model_type": "nobodys"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ReshardError, match="experts that are stacked in one tensor"):
        reshard.convert(source, tmp_path / "out", quantize="fp8")


def test_a_width_that_is_no_multiple_of_32(hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("gpt_oss", dtype="bfloat16", intermediate_size=80)
    with pytest.raises(ReshardError, match="not divisible into blocks"):
        reshard.convert(plain, tmp_path / "out", quantize="mxfp4")


def test_nothing_to_quantize(hf_model: Models, tmp_path: Path) -> None:
    source = shutil.copytree(hf_model("qwen3"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text()) | {"model_type": "nobodys"}
    (source / "config.json").write_text(json.dumps(config))
    renamed = {name.replace("layers", "blocks"): tensor for name, tensor in tensors_of(source).items()}
    save_file(renamed, source / "model.safetensors")
    with pytest.raises(ReshardError, match="no weight can be quantized"):
        reshard.convert(source, tmp_path / "out", quantize="fp8")
