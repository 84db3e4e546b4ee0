"""Quantized folders are copied unchanged, and counted by the weights that they represent."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import deserialize
from safetensors.torch import load_file

import reshard
from reshard.base.errors import ReshardError
from reshard.codecs import byte_values
from reshard.formats import quantization
from reshard.formats.quantization_schemes import METHODS, SCHEMES, TESTED, QuantizationScheme
from reshard.oracle.transformers import transformers_logits
from tests.commandline import reshard as command
from tests.environments import python
from tests.genuine import quantized
from tests.judges import TOKENS

Models = Callable[..., Path]
Stored = dict[str, tuple[str, list[int], bytes]]


def stored(folder: Path) -> Stored:
    """Each tensor as the safetensors library finds it: dtype, shape and bytes."""
    found = [each for file in folder.glob("*.safetensors") for each in deserialize(file.read_bytes())]
    return {name: (entry["dtype"], entry["shape"], bytes(entry["data"])) for name, entry in found}


def settings(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def problems_of(error: pytest.ExceptionInfo[ReshardError]) -> list[tuple[str, str | None, str | None]]:
    return [(each.message, each.tensor, each.expected) for each in error.value.problems]


@pytest.fixture(scope="module")
def folders(hf_model: Models, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """The plain and the quantized folder of a model: FP8, or MXFP4 for gpt-oss."""
    made: dict[str, Path] = {}

    def get(name: str) -> tuple[Path, Path]:
        plain = hf_model(name, dtype="bfloat16")
        if name not in made:
            make = quantized.mxfp4 if name == "gpt_oss" else quantized.fp8
            made[name] = make(plain, tmp_path_factory.mktemp("quantized") / name)
        return plain, made[name]

    return get


MODELS = ["qwen3", "qwen3_moe", "deepseek_v3_mtp", "gpt_oss"]


# ------------------------------------------------------------------------------------------------ copied


@pytest.mark.parametrize("name", MODELS)
def test_transformers_finds_the_same_model_in_other_shards(
    name: str, folders: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    _, source = folders(name)
    plan = reshard.convert(source, tmp_path / "out", to="huggingface", max_shard_size="100KB").plan
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert stored(tmp_path / "out") == stored(source)
    assert settings(tmp_path / "out") == settings(source)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    expected = transformers_logits(source, TOKENS, dtype="bfloat16")
    assert expected.std() > 0.1
    np.testing.assert_array_equal(transformers_logits(tmp_path / "out", TOKENS, dtype="bfloat16"), expected)
    assert not plan.dropped
    assert reshard.verify(source, tmp_path / "out").equal


COPIED_BY_OTHERS = ["W4A16", "W3A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16", "nf4", "int8"]
PACKED_ALONE = ["W4A16_ASYM", "awq", "gptq"]
"""Methods that transformers loads only on a GPU, or not at all as saved."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*COPIED_BY_OTHERS, *PACKED_ALONE])
def test_what_other_tools_quantized(kind: str, hf_model: Models, tmp_path: Path) -> None:
    """Copied byte for byte, and for transformers in their environment the same model."""
    plain, source, out = hf_model("qwen3", dtype="bfloat16"), tmp_path / "source", tmp_path / "out"
    made = [python("quantizers"), "-m", "tests.genuine.make_quantized"]
    subprocess.run([*made, kind, plain, source], check=True)
    reshard.convert(source, out, to="huggingface", max_shard_size="50KB")
    assert stored(out) == stored(source)
    assert settings(out) == settings(source)
    found = reshard.inspect(source)
    added = sum(
        tensor.numel()
        for name, tensor in load_file(source / "model.safetensors").items()
        if name.endswith("bias")
    )
    assert found.whole
    assert found.checkpoint.parameters - added == reshard.open(plain).checkpoint.parameters
    assert settings(source)["quant_method"] in str(found.checkpoint.quantization)
    if kind in COPIED_BY_OTHERS:
        for folder in (source, out):
            subprocess.run([*made, "logits", folder, folder.with_suffix(".npy")], check=True)
        np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), np.load(tmp_path / "source.npy"))


def test_a_family_that_is_forced(folders: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    _, source = folders("qwen3_moe")
    reshard.convert(source, tmp_path / "out", to="huggingface", family="qwen3_moe")
    assert stored(tmp_path / "out") == stored(source)


def test_a_family_that_nobody_declared(folders: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    _, source = folders("qwen3_moe")
    folder = shutil.copytree(source, tmp_path / "source")
    edit(folder, model_type="nobodys")
    reshard.convert(folder, tmp_path / "out", to="huggingface", max_shard_size="50KB")
    assert stored(tmp_path / "out") == stored(source)
    assert settings(tmp_path / "out") == settings(source)


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_settings_are_those_of_the_weights_whatever_the_base_says(
    folders: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    plain, source = folders("qwen3")
    reshard.convert(source, tmp_path / "out", to="huggingface", base=plain)
    assert settings(tmp_path / "out") == settings(source)


def test_a_method_whose_tensors_are_not_known(hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("qwen3", dtype="bfloat16")
    name = "model.layers.0.mlp.up_proj"
    tensors = packed(load_file(plain / "model.safetensors"), name, {"W_q": torch.ones(8, 8).to(torch.uint8)})
    folder = quantized.with_tensors(plain, tmp_path / "source", tensors, {"quant_method": "hqq"})
    reshard.convert(folder, tmp_path / "out", to="huggingface")
    assert stored(tmp_path / "out") == stored(folder)
    assert settings(tmp_path / "out") == {"quant_method": "hqq"}
    assert reshard.inspect(folder).whole
    with pytest.raises(ReshardError, match="the weights are quantized"):
        reshard.convert(folder, tmp_path / "megatron", to="megatron")


def test_settings_outside_of_the_config(folders: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    """TensorRT-LLM reads hf_quant_config.json. Plain weights do not get that of a quantized base."""
    plain, source = folders("qwen3")
    folder = shutil.copytree(source, tmp_path / "source")
    (folder / "hf_quant_config.json").write_text('{"producer": {"name": "modelopt"}}')
    reshard.convert(folder, tmp_path / "out", to="huggingface")
    assert (tmp_path / "out" / "hf_quant_config.json").read_bytes() == (
        folder / "hf_quant_config.json"
    ).read_bytes()
    reshard.convert(plain, tmp_path / "plain", to="huggingface", base=folder)
    assert not (tmp_path / "plain" / "hf_quant_config.json").exists()
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


def test_weights_whose_config_does_not_say_that_they_are_quantized(
    folders: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    plain, source = folders("qwen3")
    folder = shutil.copytree(source, tmp_path / "source")
    (folder / "config.json").write_bytes((plain / "config.json").read_bytes())
    plan = reshard.convert(folder, tmp_path / "out", to="huggingface").plan
    assert stored(tmp_path / "out") == stored(source)
    (note,) = [note for note in plan.notes if "quantized" in note]
    assert note in reshard.inspect(folder).notes
    assert not [note for note in reshard.inspect(source).notes if "quantized" in note]


# ------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    "options",
    [{"to": to} for to in ("megatron", "megatron-legacy", "internlm", "dcp", "deepspeed")]
    + [{"to": "huggingface", "dtype": "bfloat16"}],
    ids=str,
)
def test_values_that_nobody_here_computes_are_refused(
    options: dict[str, str], hf_model: Models, tmp_path: Path
) -> None:
    plain = hf_model("qwen3", dtype="float16")
    source = awq(plain, tmp_path / "source")
    with pytest.raises(ReshardError) as refused:
        reshard.convert(source, tmp_path / "out", **options)
    (problem,) = refused.value.problems
    flag = "--dtype" if "dtype" in options else f"--to {options['to']}"
    assert problem.message == "the weights are quantized"
    assert str(problem.found).startswith("awq, 4 bits, groups of 16; ")
    assert flag in str(problem.found)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ReshardError, match="cannot be compared with plain ones") as refused:
        reshard.verify(source, plain)
    assert "--" not in str(refused.value.problems[0].remedy)  # verify has no --to and no --dtype
    assert reshard.inspect(source).next == ""


def awq(plain: Path, out: Path) -> Path:
    """The names and shapes of AutoAWQ, for a kernel with an unknown order of values."""
    tensors = load_file(plain / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        parts = {
            "qweight": torch.zeros(columns, rows // 8, dtype=torch.int32),
            "qzeros": torch.zeros(columns // 16, rows // 8, dtype=torch.int32),
            "scales": torch.ones(columns // 16, rows, dtype=torch.float16),
        }
        tensors = packed(tensors, name.removesuffix(".weight"), parts)
    told = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemv"}
    return quantized.with_tensors(plain, out, tensors, told)


LOST = [
    (
        "qwen3",
        "model.layers.1.mlp.up_proj.weight_scale_inv",
        "model.layers.1.mlp.up_proj.weight",
        "weight_scale_inv",
    ),
    ("qwen3", "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight", "weight"),
    (
        "gpt_oss",
        "model.layers.2.mlp.experts.down_proj_scales",
        "model.layers.2.mlp.experts.down_proj",
        "down_proj_scales",
    ),
]


def test_the_method_of_the_config_chooses_among_schemes_with_the_same_parts(
    hf_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arithmetic of the new one is known, and that of the older one is not for this method."""
    rows = QuantizationScheme(
        *("rows", "{}", ("{}_scale",), ("int8",), 8), methods=("rowint8",), tables=byte_values.INT8
    )
    monkeypatch.setattr(quantization, "SCHEMES", (*SCHEMES, rows))
    monkeypatch.setattr(quantization, "METHODS", {*METHODS, "rowint8"})
    quantization.schemes_with.cache_clear()
    try:
        plain = hf_model("llama", dtype="bfloat16")
        tensors = load_file(plain / "model.safetensors")
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            scale = tensors[name].float().abs().amax(1, keepdim=True) / 127
            tensors |= {name: (tensors[name] / scale).round().to(torch.int8), f"{name}_scale": scale}
        told = {"quant_method": "rowint8"}
        source = quantized.with_tensors(plain, tmp_path / "source", tensors, told)
        reshard.convert(source, tmp_path / "out", dtype="bfloat16")
    finally:
        quantization.schemes_with.cache_clear()
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(
        load_file(tmp_path / "out/model.safetensors")[name],
        (tensors[name].float() * tensors[f"{name}_scale"]).bfloat16(),
    )


JUDGES: dict[str, str | None] = {
    "fp8": "transformers (fp8)",
    "mxfp4": "gpt-oss",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "ModelOpt",
    "awq": "AutoAWQ",
    "gptq": "AutoGPTQ",
    "auto-round": "auto-round",
    "bitsandbytes": "bitsandbytes",
}
"""The tools of `TESTED` by the `quant_method` of what they write; None for a method that no tool judges."""


def test_every_method_whose_arithmetic_is_known_is_judged() -> None:
    assert {method for scheme in SCHEMES for method in scheme.methods if method} == JUDGES.keys()
    assert {each.tool for each in TESTED} == {*JUDGES.values()} - {None}


@pytest.mark.parametrize("model_type", [None, "nobodys"])
@pytest.mark.parametrize(("name", "lost", "weight", "expected"), LOST, ids=[row[1] for row in LOST])
def test_a_weight_without_one_of_its_parts(
    name: str,
    lost: str,
    weight: str,
    expected: str,
    model_type: str | None,
    folders: Callable[[str], tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    plain, source = folders(name)
    tensors = load_file(source / "model.safetensors")
    del tensors[lost]
    folder = quantized.with_tensors(plain, tmp_path / "source", tensors, settings(source))
    if model_type:
        edit(folder, model_type=model_type)
    with pytest.raises(ReshardError) as refused:
        reshard.convert(folder, tmp_path / "out", to="huggingface")
    assert problems_of(refused) == [("a quantized weight is incomplete", weight, expected)]
    method = settings(source)["quant_method"]
    assert str(refused.value.problems[0].rule).startswith(f"{method} ({method.upper()}) stores a weight as ")
    found = reshard.inspect(folder)
    assert [problem.message for problem in found.problems] == ["a quantized weight is incomplete"]


def test_a_layer_that_is_missing_of_a_declared_family(
    folders: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    plain, source = folders("qwen3")
    lost = "model.layers.1.mlp.up_proj.weight"
    tensors = {k: v for k, v in load_file(source / "model.safetensors").items() if not k.startswith(lost)}
    folder = quantized.with_tensors(plain, tmp_path / "source", tensors, settings(source))
    with pytest.raises(ReshardError) as refused:
        reshard.convert(folder, tmp_path / "out", to="huggingface")
    assert problems_of(refused) == [("a tensor is missing", lost, "[96, 64]")]


def test_a_weight_of_another_size_than_the_config_says(
    folders: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    _, source = folders("gpt_oss")
    folder = shutil.copytree(source, tmp_path / "source")
    edit(folder, intermediate_size=128)
    with pytest.raises(ReshardError, match="wrong shape"):
        reshard.convert(folder, tmp_path / "out", to="huggingface")


# ------------------------------------------------------------------------------------------------ counted


@pytest.mark.parametrize("name", MODELS)
def test_inspect_counts_weights_and_says_how_they_are_quantized(
    name: str, folders: Callable[[str], tuple[Path, Path]]
) -> None:
    plain, source = folders(name)
    result = command("inspect", source, "--json")
    assert result.code == 0
    assert result.json["parameters"] == reshard.open(plain).checkpoint.parameters
    scales = [key for key in stored(source) if key.endswith(("_scale_inv", "_scales"))]
    assert result.json["quantization"]["weights"] == len(scales) > 0
    assert result.json["quantization"]["method"] == ("mxfp4" if name == "gpt_oss" else "fp8")
    shown = command("inspect", source).out
    assert ("mxfp4" if name == "gpt_oss" else "fp8, blocks of 16 × 16") in shown
    assert command("inspect", plain, "--json").json["quantization"] is None
    plan = command(
        "convert", source, source.parent / "out", "--to", "huggingface", "--dry-run", "--json"
    ).json
    assert plan["parameters"] == result.json["parameters"]


def packed(
    tensors: dict[str, torch.Tensor], linear: str, parts: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    kept = {name: tensor for name, tensor in tensors.items() if name != f"{linear}.weight"}
    return kept | {f"{linear}.{part}": tensor for part, tensor in parts.items()}


def test_awq_is_called_by_its_name_and_not_incomplete(hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("qwen3", dtype="float16")
    folder = awq(plain, tmp_path / "awq")
    found = reshard.inspect(folder)
    assert found.whole, found.problems
    assert str(found.checkpoint.quantization) == "awq, 4 bits, groups of 16"
    assert found.checkpoint.parameters == reshard.open(plain).checkpoint.parameters
    with pytest.raises(ReshardError) as refused:
        reshard.convert(folder, tmp_path / "out", to="megatron")
    assert [problem.message for problem in refused.value.problems] == ["the weights are quantized"]


FP8, BYTE = torch.float8_e4m3fn, torch.int8
OTHERS = {
    "DeepSeek's own names": ("fp8", FP8, {"scale": torch.ones(1)}),
    "per tensor, with activations": (
        "fp8",
        FP8,
        {"weight_scale": torch.ones(1), "input_scale": torch.ones(1)},
    ),
    "per channel": ("compressed-tensors", BYTE, {"weight_scale": torch.ones(96, 1)}),
    "rounded, but not compressed": (
        "compressed-tensors",
        torch.bfloat16,
        {"weight_scale": torch.ones(96, 1)},
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_names_and_types(case: str, hf_model: Models, tmp_path: Path) -> None:
    """As vLLM and transformers read them; one layer is enough, since the others are plain."""
    method, dtype, parts = OTHERS[case]
    plain, linear = hf_model("qwen3", dtype="bfloat16"), "model.layers.2.mlp.up_proj"
    tensors = load_file(plain / "model.safetensors")
    parts = {"weight": tensors[f"{linear}.weight"].to(dtype), **parts}
    told = {"quant_method": method}
    folder = quantized.with_tensors(plain, tmp_path / "source", packed(tensors, linear, parts), told)
    found = reshard.inspect(folder)
    assert found.whole, found.problems
    assert found.checkpoint.quantization and [*found.checkpoint.quantization.weights] == [f"{linear}.weight"]
    assert found.checkpoint.parameters == reshard.open(plain).checkpoint.parameters
    reshard.convert(folder, tmp_path / "out", to="huggingface")
    assert stored(tmp_path / "out") == stored(folder)
    del parts[next(name for name in parts if "scale" in name)]
    broken = quantized.with_tensors(plain, tmp_path / "broken", packed(tensors, linear, parts), told)
    assert reshard.inspect(broken).whole == (dtype == torch.bfloat16)  # without a scale, it is a plain weight


@pytest.mark.parametrize(
    "told", [{"format": "marlin-24"}, {"sparsity_config": {"format": "sparse-24-bitmask"}}]
)
def test_formats_of_compressed_tensors_that_are_not_known(
    told: dict[str, object], hf_model: Models, tmp_path: Path
) -> None:
    plain, linear = hf_model("qwen3", dtype="bfloat16"), "model.layers.2.mlp.up_proj"
    parts = {"weight_scale": torch.ones(96, 1), "weight_packed": torch.ones(4, 4, dtype=torch.int32)}
    tensors = packed(load_file(plain / "model.safetensors"), linear, {**parts, "meta": torch.ones(2)})
    told = {"quant_method": "compressed-tensors", **told}
    folder = quantized.with_tensors(plain, tmp_path / "source", tensors, told)
    assert reshard.inspect(folder).whole
    reshard.convert(folder, tmp_path / "out", to="huggingface")
    assert stored(tmp_path / "out") == stored(folder)


def test_names_of_a_plain_model_that_sound_quantized(hf_model: Models, tmp_path: Path) -> None:
    plain = hf_model("qwen3")
    names = ("model.codec.scales", "model.mlp.act.scales", "model.embed_tokens.scale", "model.norm.scale")
    tensors = load_file(plain / "model.safetensors") | {name: torch.ones(3) for name in names}
    folder = quantized.with_tensors(plain, tmp_path / "source", tensors, None)
    edit(folder, model_type="nobodys")
    assert reshard.open(folder).checkpoint.quantization is None
    reshard.convert(folder, tmp_path / "out", to="huggingface")
    assert stored(tmp_path / "out") == stored(folder)


# ------------------------------------------------------------------------------------------------ dtypes


def test_every_type_that_safetensors_stores(hf_model: Models, tmp_path: Path) -> None:
    """Including those smaller than a byte, which are written by hand: torch cannot save all of them."""
    plain = hf_model("qwen3")
    folder = quantized.with_tensors(plain, tmp_path / "source", {}, None)
    edit(folder, model_type="nobodys")
    sizes = dict.fromkeys(
        ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8
    )
    sizes |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16}
    sizes |= {"I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64}
    header, data = {}, b""
    for name, bits in sizes.items():
        content = bytes(range(3 * bits))
        header[f"model.{name}"] = {
            "dtype": name,
            "shape": [3, 8],
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert stored(folder).keys() == {f"model.{name}" for name in sizes}
    reshard.convert(folder, tmp_path / "out", to="huggingface", max_shard_size="100B")
    assert stored(tmp_path / "out") == stored(folder)
    assert reshard.open(folder).checkpoint.parameters == 24 * len(sizes)
    assert reshard.verify(folder, tmp_path / "out").equal


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("value", ["nan", "-nan", "inf", "448"])
def test_numbers_of_eight_bits_that_are_none(
    dtype: torch.dtype, value: str, hf_model: Models, tmp_path: Path
) -> None:
    tensor = torch.full((4, 4), float(value)).to(dtype)
    folder = quantized.with_tensors(hf_model("qwen3"), tmp_path / "source", {"model.x": tensor}, None)
    edit(folder, model_type="nobodys")
    report = reshard.convert(folder, tmp_path / "out", to="huggingface").report
    assert report is not None
    assert report.nonfinite == ([] if tensor.float().isfinite().all() else ["model.x"])
