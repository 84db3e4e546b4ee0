"""Quantized weights become plain ones, with the values of transformers and of the publishers' formula."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import reshard
from reshard.algebra.tensors import Tensor
from reshard.base.errors import ReshardError
from reshard.codecs.byte_values import FP8
from reshard.codecs.decoded_blocks import POWERS
from reshard.oracle.transformers import transformers_logits
from tests.commandline import reshard as command
from tests.genuine import quantized
from tests.judges import TOKENS

Models = Callable[..., Path]
Tensors = dict[str, torch.Tensor]


def published(folder: Path, block: tuple[int, int]) -> Tensors:
    """All weights of a block-FP8 folder by the formula that its publishers give."""
    stored = load_file(folder / "model.safetensors")
    plain = {name: tensor for name, tensor in stored.items() if not name.endswith("_scale_inv")}
    for name, tensor in plain.items():
        if f"{name}_scale_inv" in stored:
            scales = _powers(stored[f"{name}_scale_inv"])
            for axis, size in enumerate(block):
                scales = scales.repeat_interleave(size, axis)
            rows, columns = tensor.shape
            plain[name] = (tensor.float() * scales[:rows, :columns]).to(torch.bfloat16)
    return plain


def _powers(scales: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()


def assert_as_transformers(source: Path, out: Path) -> None:
    """Assert that transformers computes the same weights and logits from a plain folder as from the quantized one."""
    judge = quantized.dequantized_by_transformers(source)
    ours = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    expected, found = judge.state_dict(), ours.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    with torch.inference_mode():
        tokens = torch.from_numpy(TOKENS)
        logits = judge(tokens, use_cache=False).logits
        assert logits.float().std() > 0.01
        assert torch.equal(ours(tokens, use_cache=False).logits, logits)


@pytest.fixture(scope="module")
def fp8(hf_model: Models, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            plain = hf_model(name, dtype="bfloat16")
            made[name] = quantized.fp8(plain, tmp_path_factory.mktemp("fp8") / name)
        return made[name]

    return get


# ------------------------------------------------------------------------------------------------ FP8


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3_mtp"])
def test_fp8_becomes_plain(name: str, fp8: Callable[[str], Path], tmp_path: Path) -> None:
    source, out = fp8(name), tmp_path / "out"
    (note,) = [
        note
        for note in reshard.convert(source, out, dtype="bfloat16").plan.notes
        if "dequantized to bfloat16" in note
    ]
    assert "fp8, " in note
    quantized.assert_holds(out, published(source, (16, 16)))
    assert_as_transformers(source, out)


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"max_shard_size": "50kB"}, {"quantize": "fp8"}, {"strip": ("base.",)}]
)
def test_a_hugging_face_folder_that_changes_is_converted(
    options: dict[str, object], hf_model: Models, tmp_path: Path
) -> None:
    """Without `to`: what is asked for says that the output is another Hugging Face folder."""
    plan = reshard.convert(hf_model("qwen3"), tmp_path / "out", dry_run=True, **options).plan
    assert plan.target == "huggingface"


def test_a_hugging_face_folder_that_would_not_change_is_refused(hf_model: Models, tmp_path: Path) -> None:
    with pytest.raises(ReshardError) as raised:
        reshard.convert(hf_model("qwen3"), tmp_path / "out", no_tokenizer=True, trust="config")
    (problem,) = raised.value.problems
    assert problem.code == "source-already-hugging-face"
    assert problem.remedy is not None and "--dtype" in problem.remedy


def test_fp8_deepseek_with_mtp_to_megatron_and_back(fp8: Callable[[str], Path], tmp_path: Path) -> None:
    source, native, out = fp8("deepseek_v3_mtp"), tmp_path / "megatron", tmp_path / "out"
    reshard.convert(source, native, to="megatron", tp=2, pp=2, ep=2)
    assert reshard.open(native).checkpoint.quantization is None
    assert "quantization_config" not in json.loads((native / "config.json").read_text())
    assert reshard.verify(source, native).equal
    reshard.convert(native, out)
    quantized.assert_holds(out, published(source, (16, 16)))
    assert_as_transformers(source, out)


@pytest.mark.parametrize("to", ["megatron-legacy", "dcp", "deepspeed", "internlm"])
def test_formats_without_scales_get_bfloat16(to: str, hf_model: Models, tmp_path: Path) -> None:
    other = {"name": "llama", "head_dim": 8} if to == "internlm" else {"name": "qwen3"}
    source = quantized.fp8(hf_model(dtype="bfloat16", **other), tmp_path / "source")
    layout = {"tp": 2} if to == "megatron-legacy" else {}
    reshard.convert(source, tmp_path / "native", to=to, **layout)
    reshard.convert(tmp_path / "native", tmp_path / "out", to="huggingface", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "out", published(source, (16, 16)))


@pytest.mark.parametrize(("dtype", "cast"), [("float32", torch.float32), ("float16", torch.float16)])
def test_other_dtypes_are_rounded_once(
    dtype: str, cast: torch.dtype, fp8: Callable[[str], Path], tmp_path: Path
) -> None:
    source, name = fp8("qwen3"), "model.layers.1.mlp.up_proj.weight"
    reshard.convert(source, tmp_path / "out", to="huggingface", dtype=dtype)
    stored = load_file(source / "model.safetensors")
    scales = stored[f"{name}_scale_inv"].repeat_interleave(16, 0).repeat_interleave(16, 1)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found[name], (stored[name].float() * scales).to(cast))
    assert {tensor.dtype for tensor in found.values()} == {cast}
    assert reshard.verify(source, tmp_path / "out").equal is False  # the norms have another dtype
    rows = reshard.verify(source, tmp_path / "out").rows
    assert {row.kind for row in rows} == {"dtype"}
    assert all("proj" not in row.tensor for row in rows)


def test_every_value_of_eight_bits() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    for name, table in FP8.items():
        expected = every.view(getattr(torch, name)).float().numpy()
        np.testing.assert_array_equal(table[:, 0], expected, err_msg=name)
        number = ~np.isnan(expected)
        signs = np.signbit(table[number, 0]), np.signbit(expected[number])
        np.testing.assert_array_equal(*signs, err_msg=name)
    expected = every.view(torch.float8_e8m0fnu).float().numpy()
    np.testing.assert_array_equal(POWERS[:255], expected[:255])


def with_blocks(plain: Path, out: Path, block: tuple[int, int], scales: torch.dtype) -> Path:
    """A folder of FP8 weights in blocks of any size, smaller at the edges, with scales of any dtype."""
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        tensors[name] = tensor.mul(900).to(torch.float8_e4m3fn)
        shape = [-(-size // n) for size, n in zip(tensor.shape, block, strict=True)]
        codes = torch.randint(112, 120, shape, generator=generator, dtype=torch.uint8)
        if scales in (torch.uint8, torch.float8_e8m0fnu):
            tensors[f"{name}_scale_inv"] = codes.view(scales)
        else:
            values = torch.rand(shape, generator=generator) / 900
            tensors[f"{name}_scale_inv"] = values.to(scales)
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    return quantized.with_tensors(plain, out, tensors, settings)


@pytest.mark.parametrize(
    "scales", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu], ids=str
)
@pytest.mark.parametrize("block", [(128, 128), (16, 32), (1, 32), (40, 24), (7, 1000)], ids=str)
@pytest.mark.core("(128, 128)-torch.bfloat16", "(40, 24)-*", "(7, 1000)-torch.float8_e8m0fnu")
def test_blocks_of_any_size_and_scales_of_any_type(
    block: tuple[int, int], scales: torch.dtype, hf_model: Models, tmp_path: Path
) -> None:
    plain = hf_model("qwen3", dtype="bfloat16")
    source = with_blocks(plain, tmp_path / "source", block, scales)
    reshard.convert(source, tmp_path / "out", to="huggingface", dtype="bfloat16", max_shard_size="60KB")
    quantized.assert_holds(tmp_path / "out", published(source, block))
    reshard.convert(source, tmp_path / "native", to="megatron", tp=2, pp=2)
    assert reshard.verify(tmp_path / "native", tmp_path / "out").equal


def test_any_range_of_elements(hf_model: Models, tmp_path: Path) -> None:
    from reshard.model.dequantization import dequantized
    from reshard.transfer.gather import Gatherer
    from reshard.transfer.thread_files import OpenFiles

    plain = hf_model("qwen3", dtype="bfloat16")
    source = with_blocks(plain, tmp_path / "source", (40, 24), torch.float32)
    tensor = dequantized(reshard.open(source).checkpoint).tensors["model.layers.0.mlp.up_proj.weight"]
    expected = (
        published(source, (40, 24))["model.layers.0.mlp.up_proj.weight"].view(torch.uint16).flatten().numpy()
    )
    gatherer, random = Gatherer(OpenFiles(), None), np.random.default_rng(0)
    for begin, end in np.sort(random.integers(0, tensor.view.numel, (200, 2))):
        np.testing.assert_array_equal(gatherer.read(tensor, int(begin), int(end)), expected[begin:end])
    matrix = expected.reshape(tensor.shape)
    for low, high in np.sort(random.integers(0, tensor.shape[1] + 1, (100, 2))).tolist():
        part = Tensor(tensor.dtype, tensor.view[3:90, low:high])
        begin, end = np.sort(random.integers(0, part.view.numel + 1, 2)).tolist()
        values = matrix[3:90, low:high].reshape(-1)[begin:end]
        np.testing.assert_array_equal(gatherer.read(part, begin, end), values)


def test_a_rank_computes_its_own_columns_alone(hf_model: Models, tmp_path: Path) -> None:
    from reshard.model import dequantization
    from reshard.transfer.gather import Gatherer
    from reshard.transfer.thread_files import OpenFiles

    source = with_blocks(hf_model("qwen3", dtype="bfloat16"), tmp_path / "source", (16, 16), torch.float32)
    tensor = dequantization.dequantized(reshard.open(source).checkpoint).tensors[
        "model.layers.0.mlp.down_proj.weight"
    ]
    (piece,) = tensor.view.pieces
    computed = piece.source
    assert isinstance(computed, dequantization.DequantizedWeight)
    rows, columns = tensor.shape
    asked: list[int] = []

    class Asked(Gatherer):
        def __call__(self, part: Tensor, begin: int, end: int) -> np.ndarray:
            asked.append(end - begin)
            return self.read(part, begin, end)

    computed.runs(columns // 4, rows, columns, columns // 4, Asked(OpenFiles(), None))
    assert asked[0] <= rows * (columns // 4 + 16)


def test_a_family_that_nobody_declared(fp8: Callable[[str], Path], tmp_path: Path) -> None:
    source = shutil.copytree(fp8("qwen3_moe"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text()) | {"model_type": "nobodys"}
    (source / "config.json").write_text(json.dumps(config))
    reshard.convert(source, tmp_path / "out", to="huggingface", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "out", published(source, (16, 16)))
    assert reshard.verify(source, tmp_path / "out").equal


def test_what_describes_the_quantization_goes(fp8: Callable[[str], Path], tmp_path: Path) -> None:
    source = shutil.copytree(fp8("qwen3"), tmp_path / "source")
    (source / "hf_quant_config.json").write_text("{}")
    stored = load_file(source / "model.safetensors")
    scale = {"model.layers.0.mlp.up_proj.input_scale": torch.ones(1)}
    quantized.save_file(stored | scale, source / "model.safetensors", metadata={"format": "pt"})
    plan = reshard.convert(source, tmp_path / "out", to="huggingface", dtype="bfloat16").plan
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    assert plan.dropped == {"quantization data": 4}
    quantized.assert_holds(
        tmp_path / "out", {k: v for k, v in published(source, (16, 16)).items() if k not in scale}
    )


# ------------------------------------------------------------------------------------------------ MXFP4


def unpacked(folder: Path) -> Tensors:
    """All weights of a folder with MXFP4, as transformers unpacks them."""
    found = load_file(folder / "model.safetensors")
    for name in [name.removesuffix("_blocks") for name in found if name.endswith("_blocks")]:
        blocks, scales = (found.pop(f"{name}_{part}") for part in ("blocks", "scales"))
        found[name] = convert_moe_packed_tensors(blocks, scales)
    return found


@pytest.mark.parametrize("width", [64, 96], ids=["square", "oblong"])
def test_mxfp4_becomes_plain(width: int, hf_model: Models, tmp_path: Path) -> None:
    """The experts of gpt-oss are as wide as its hidden size, so no shape tells which axis is which."""
    plain = hf_model("gpt_oss", dtype="bfloat16", hidden_size=64, intermediate_size=width)
    source = quantized.mxfp4(plain, tmp_path / "source")
    reshard.convert(source, tmp_path / "out", to="huggingface", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "out", unpacked(source))
    assert_as_transformers(source, tmp_path / "out")
    reshard.convert(source, tmp_path / "native", to="megatron", tp=2, pp=2, ep=2, etp=1)
    assert reshard.verify(source, tmp_path / "native").equal
    reshard.convert(tmp_path / "native", tmp_path / "again")
    quantized.assert_holds(tmp_path / "again", unpacked(source))
    words = command("inspect", source, "--json").json["next"].split()
    assert command(*words[1:]).code == 0
    assert reshard.verify(source, Path(words[3])).equal


def test_mxfp4_scales_of_any_size(hf_model: Models, tmp_path: Path) -> None:
    source = quantized.mxfp4(hf_model("gpt_oss", dtype="bfloat16"), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    shape = tensors[name].shape
    tensors[name] = torch.arange(tensors[name].numel()).remainder(254).add(1).to(torch.uint8).reshape(shape)
    quantized.save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    report = reshard.convert(source, tmp_path / "out", to="huggingface", dtype="bfloat16").report
    assert report is not None
    assert report.nonfinite == ["model.layers.0.mlp.experts.down_proj"]  # six times the largest scale
    quantized.assert_holds(tmp_path / "out", unpacked(source))


# ------------------------------------------------------------------------------------------------ seen through


def test_verify_says_how_it_compared(fp8: Callable[[str], Path], tmp_path: Path) -> None:
    source, out = fp8("qwen3"), tmp_path / "out"
    reshard.convert(source, out, to="huggingface", dtype="bfloat16")
    told = command("verify", source, out, "--json")
    assert told.code == 0
    assert [
        note for note in told.json["notes"] if note.startswith("A: ") and "dequantized to bfloat16" in note
    ]
    told = command("verify", source, source, "--json")
    assert [note for note in told.json["notes"] if note.startswith("B: compared as stored: fp8")]
    tensors = load_file(out / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] += 1
    quantized.save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (row,) = reshard.verify(out, source).rows
    assert (row.tensor, row.kind) == (name, "values")
    assert row.differ == 1


def test_verify_with_a_folder_that_holds_no_weights(fp8: Callable[[str], Path], tmp_path: Path) -> None:
    source = fp8("qwen3")
    other = quantized.with_tensors(source, tmp_path / "other", {}, None)
    found = reshard.verify(source, other)
    assert {row.kind for row in found.rows} == {"only in A"}


def test_a_dry_run_reads_no_weight(fp8: Callable[[str], Path], tmp_path: Path) -> None:
    plan = command("convert", fp8("qwen3"), tmp_path / "out", "--to", "megatron", "--dry-run", "--json")
    assert plan.code == 0
    assert plan.json["dtypes"].keys() == {"bfloat16"}
    assert any("dequantized" in note for note in plan.json["notes"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3_mtp"])
def test_inspect_proposes_a_command_that_works(name: str, fp8: Callable[[str], Path], tmp_path: Path) -> None:
    source = shutil.copytree(fp8(name), tmp_path / "source")
    words = command("inspect", source, "--json").json["next"].split()
    assert words[:3] == ["reshard", "convert", str(source)]
    assert "megatron" in words
    assert command(*words[1:]).code == 0
    assert reshard.verify(source, Path(words[3])).equal


def with_rows(plain: Path, out: Path, more: int = 0) -> tuple[Path, Tensors]:
    """A folder of int8 weights whose scales are [out] (and `more`), and the plain weights that they mean."""
    tensors: Tensors = {}
    expected: Tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        tensors[name] = expected[name] = tensor
        if name.endswith("_proj.weight"):
            scales = (tensor.float().abs().amax(1) / 127).clamp(min=1e-9)
            tensors[name] = (tensor / scales[:, None]).round().to(torch.int8)
            expected[name] = (tensors[name].float() * scales[:, None]).bfloat16()
            tensors[f"{name}_scale"] = torch.cat([scales, scales[:more]])
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    return quantized.with_tensors(plain, out, tensors, settings), expected


def test_scales_of_rows(hf_model: Models, tmp_path: Path) -> None:
    source, expected = with_rows(hf_model("qwen3", dtype="bfloat16"), tmp_path / "source")
    reshard.convert(source, tmp_path / "out", to="huggingface", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "out", expected)


# ------------------------------------------------------------------------------------------------ refused


def test_scales_of_more_rows_than_there_are(hf_model: Models, tmp_path: Path) -> None:
    source, _ = with_rows(hf_model("qwen3", dtype="bfloat16"), tmp_path / "source", more=1)
    result = command("convert", source, tmp_path / "out", "--to", "megatron")
    assert result.code == 2
    assert "the scales of a quantized weight do not match it" in result.err
    assert "weight_block_size" not in result.err  # compressed-tensors has no such setting


def test_scales_that_do_not_tell_their_blocks(hf_model: Models, tmp_path: Path) -> None:
    """Without a block size, the smaller block could be at either edge."""
    source = with_blocks(hf_model("qwen3", dtype="bfloat16"), tmp_path / "source", (40, 24), torch.float32)
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]["weight_block_size"]
    (source / "config.json").write_text(json.dumps(config))
    result = command("convert", source, tmp_path / "out", "--to", "megatron")
    assert result.code == 2
    assert "the scales of a quantized weight do not match it" in result.err
    assert "weight_block_size" in result.err
    assert not (tmp_path / "out").exists()
    assert command("inspect", source, "--json").json["next"] == ""


@pytest.mark.parametrize("shape", [(0, 64), (64,), ()], ids=str)
def test_a_weight_that_is_no_matrix(
    shape: tuple[int, ...], fp8: Callable[[str], Path], tmp_path: Path
) -> None:
    source, name = fp8("qwen3"), "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(source / "model.safetensors")
    tensors[name] = torch.zeros(shape).to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.zeros([-(-size // 16) for size in shape])
    told = json.loads((source / "config.json").read_text())["quantization_config"]
    folder = quantized.with_tensors(source, tmp_path / "source", tensors, told)
    with pytest.raises(ReshardError, match="do not match it"):
        reshard.convert(folder, tmp_path / "out", to="huggingface", dtype="bfloat16")


def test_fp8_whose_config_does_not_say_so(fp8: Callable[[str], Path], tmp_path: Path) -> None:
    source = shutil.copytree(fp8("qwen3"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config))
    reshard.convert(source, tmp_path / "out", to="huggingface", dtype="bfloat16")
    quantized.assert_holds(tmp_path / "out", published(source, (16, 16)))


def test_a_dtype_that_is_none(fp8: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match="cannot be converted to this dtype"):
        reshard.convert(fp8("qwen3"), tmp_path / "out", to="huggingface", dtype="float8_e4m3fn")


def test_a_value_that_is_no_number_is_reported(fp8: Callable[[str], Path], tmp_path: Path) -> None:
    source = shutil.copytree(fp8("qwen3"), tmp_path / "source")
    tensors, name = load_file(source / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    tensors[name].view(torch.uint8)[2, 2] = 0x7F
    quantized.save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    report = reshard.convert(source, tmp_path / "out", to="huggingface", dtype="bfloat16").report
    assert report is not None
    assert report.nonfinite == [name]
    assert np.isnan(transformers_logits(tmp_path / "out", TOKENS)).any()
