"""GGUF files: their tensors compared with what llama.cpp's package gguf names, computes and reads.

`tests/test_gguf_peer.py` compares complete files with those of llama.cpp's converter, and logits of its library.
"""

from __future__ import annotations

import math
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import reshard
from reshard.base.errors import ReshardError
from reshard.codecs.gguf_types import QUANTIZED, READABLE_TYPES
from reshard.formats.gguf import container
from reshard.formats.gguf.write import rotary_divisors
from reshard.formats.huggingface import QUANTIZED as OF_THE_HUB
from reshard.model.quantizer import STORAGES
from reshard.transfer.gather import Gatherer
from reshard.transfer.source_files import Sources
from reshard.transfer.thread_files import OpenFiles
from tests.commandline import reshard as command
from tests.genuine.huggingface import COMMON, VARIANTS, _random_model
from tests.genuine.peft import make_adapter
from tests.genuine.tiny_configs import GEMMA

Model = Callable[..., Path]
Array = np.ndarray[Any, Any]

ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
}
GEMMA3 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 6,
    "tie_word_embeddings": True,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "rope_parameters": ROPES,
}
ARCHITECTURES = {
    "llama": "LLAMA",
    "llama_tied": "LLAMA",
    "mistral": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "qwen3_moe": "QWEN3MOE",
    "gemma3_text": "GEMMA3",
    "gpt_oss": "GPT_OSS",
    "deepseek_v3": "DEEPSEEK2",
    "deepseek_v3_mtp": "DEEPSEEK2",
}
LAYERS, HEADS, GROUPS, EXPERTS = 4, 8, 4, 8


@pytest.fixture(scope="module")
def model(hf_model: Model) -> Iterator[Model]:
    """A folder of one of the variants, in bfloat16, or of Gemma 3."""
    VARIANTS["gemma3_text"] = ("gemma3_text", GEMMA3)
    yield lambda name, dtype="bfloat16", **more: hf_model(name, dtype=dtype, **more)
    del VARIANTS["gemma3_text"]


def stored(file: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The type, shape and bytes of each tensor, as the package reads them."""
    return {
        each.name: (each.tensor_type.name, tuple(map(int, each.shape[::-1])), each.data.tobytes())
        for each in GGUFReader(file).tensors
    }


def turned(rows: Array, heads: int) -> Array:
    """`LlamaModel.permute` of llama.cpp's converter."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def changed(name: str, family: str, value: Array) -> Iterator[tuple[str, Array]]:
    """The tensors that llama.cpp's converter makes of one, under names that the package maps."""
    if family in ("llama", "mistral") and name.endswith(("q_proj.weight", "k_proj.weight")):
        value = turned(value, HEADS if "q_proj" in name else GROUPS)
    if "kv_b_proj" in name:
        both = value.reshape(HEADS, -1, value.shape[1])
        yield name.replace("kv_b", "k_b"), both[:, :16].swapaxes(1, 2)
        yield name.replace("kv_b", "v_b"), both[:, 16:]
    elif "gate_up_proj" in name:  # of gpt-oss
        value = value if name.endswith("_bias") else value.swapaxes(1, 2)
        for first, half in enumerate(("gate_proj", "up_proj")):
            yield in_package(name.replace("gate_up_proj", half)), value[:, first::2]
    elif family == "gpt_oss" and "experts.down_proj" in name:
        yield in_package(name), value if name.endswith("_bias") else value.swapaxes(1, 2)
    else:
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), value


def in_package(name: str) -> str:
    return name.replace("_bias", ".bias") if name.endswith("_bias") else f"{name}.weight"


def reference(folder: Path, variant: str, kind: str) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What the file must have: names, types and bytes by the package gguf."""
    family = variant.removesuffix("_tied").removesuffix("_mtp")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[ARCHITECTURES[variant]], LAYERS)
    found: dict[str, Array] = {}
    stacks: dict[str, dict[int, Array]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if family == "gemma3_text" and name.endswith("norm.weight"):
            found[name] = ((tensor if tensor.dtype == torch.float16 else tensor.float()) + 1).float().numpy()
            continue
        before, _, after = name.partition(".experts.")
        number, _, rest = after.partition(".")
        if f"model.layers.{LAYERS}." in name:
            continue  # multi-token prediction
        if number.isdecimal():
            stacks.setdefault(f"{before}.experts.{rest}", {})[int(number)] = tensor.float().numpy()
            continue
        found |= dict(changed(name, family, tensor.float().numpy()))
    found |= {name: np.stack([each[i] for i in range(len(each))]) for name, each in stacks.items()}
    result = {}
    for name, value in found.items():
        called = names.get_name(name, (".weight", ".bias")) or names.get_name(f"{name}.weight", (".weight",))
        called = called if called.endswith((".weight", ".bias")) else f"{called}.weight"
        result[called] = typed(called, np.ascontiguousarray(value), kind)
    return result


def typed(name: str, value: Array, kind: str) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor in the type that `prepare_tensors` of llama.cpp's converter gives it."""
    wanted = GGMLQuantizationType[kind.upper()]
    if kind == "mxfp4" and "_exps" not in name:
        wanted = GGMLQuantizationType.Q8_0
    if value.ndim == 1 or name.endswith(("_norm.weight", "ffn_gate_inp.weight", ".bias")):
        wanted = GGMLQuantizationType.F32
    elif value.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0]:
        wanted = GGMLQuantizationType.F16
    return wanted.name, value.shape, gguf.quants.quantize(value, wanted).tobytes()


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16", "q8_0"])
@pytest.mark.parametrize("variant", ARCHITECTURES)
@pytest.mark.core(
    "llama-f16",
    "llama_tied-q8_0",
    "qwen3_moe-q8_0",
    "gemma3_text-f16",
    "gpt_oss-f16",
    "deepseek_v3_mtp-q8_0",
)
def test_tensors_are_those_that_the_package_makes(
    variant: str, kind: str, model: Model, tmp_path: Path
) -> None:
    folder, file = model(variant), tmp_path / "model.gguf"
    reshard.convert(folder, file, quantize=kind)
    assert stored(file) == reference(folder, variant, kind)


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q5_0", "q5_1", "mxfp4"])
def test_blocks_are_those_that_the_package_makes(kind: str, model: Model, tmp_path: Path) -> None:
    folder, file = model("qwen3_moe"), tmp_path / "model.gguf"
    reshard.convert(folder, file, quantize=kind)
    assert stored(file) == reference(folder, "qwen3_moe", kind)


@pytest.mark.parametrize("kind", ["tq1_0", "tq2_0"])
def test_ternary_blocks_are_those_that_the_package_makes(kind: str, model: Model, tmp_path: Path) -> None:
    folder, file = model("qwen3", hidden_size=256, intermediate_size=256), tmp_path / "model.gguf"
    reshard.convert(folder, file, quantize=kind)
    expected = reference(folder, "qwen3", kind)
    for name in ("token_embd.weight", "output.weight"):
        kept, shape, content = reference(folder, "qwen3", "f16")[name]
        expected[name] = (kept, shape, content)
    assert stored(file) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_type_is_that_of_the_source(dtype: str, model: Model, tmp_path: Path) -> None:
    folder = model("llama", dtype)
    kind = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[dtype]
    reshard.convert(folder, tmp_path / "plain.gguf")
    reshard.convert(model("llama", "float32"), tmp_path / "cast.gguf", dtype=dtype)
    assert stored(tmp_path / "plain.gguf") == reference(folder, "llama", kind)
    assert stored(tmp_path / "cast.gguf") == reference(model("llama", "float32"), "llama", kind)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_norms_of_gemma_are_summed_in_the_dtype_of_the_converter(
    dtype: str, model: Model, tmp_path: Path
) -> None:
    """Plus one in float16 or float32. `verify` finds the rounded sum, and the way back is exact but for it."""
    folder, file = model("gemma3_text", dtype), tmp_path / "model.gguf"
    reshard.convert(folder, file, quantize="f16")
    assert stored(file) == reference(folder, "gemma3_text", "f16")
    reshard.convert(folder, file, overwrite=True)
    assert all(row.kind == "dtype" for row in reshard.verify(folder, file).rows)
    reshard.convert(file, tmp_path / "back", base=folder, dtype=dtype)
    norm = "model.norm.weight"
    weight, returned = (load_file(each / "model.safetensors")[norm] for each in (folder, tmp_path / "back"))
    total = (weight if dtype == "float16" else weight.float()) + 1
    assert returned.equal((total.double() - 1).to(weight.dtype))


@pytest.mark.parametrize("base", [500000.0, 10000.0])
def test_rotary_frequencies_are_those_of_the_converter(base: float) -> None:
    """`LlamaModel.generate_extra_tensors`, with the constants of Llama 3.1 and 3.2."""
    for factor in (8.0, 32.0):
        rope = {
            "rope_type": "llama3",
            "rope_theta": base,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        found = rotary_divisors({"model_type": "llama", "head_dim": 128, "rope_parameters": rope})
        divisors = []
        for frequency in 1.0 / (base ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128)):
            wave = 2 * math.pi / frequency
            smooth = (8192 / wave - 1.0) / 3.0
            between = 1 / ((1 - smooth) / factor + smooth)
            divisors.append(1 if wave < 2048 else factor if wave > 8192 else between)
        assert np.array(found, np.float32).tobytes() == torch.tensor(divisors).numpy().tobytes()


def test_mxfp4_of_gpt_oss_is_repacked(model: Model, tmp_path: Path) -> None:
    """No value changes, and no block gets another scale: the package reads what transformers would."""
    folder, file = tmp_path / "mxfp4", tmp_path / "model.gguf"
    reshard.convert(model("gpt_oss"), folder, quantize="mxfp4")
    reshard.convert(folder, file)
    reshard.convert(folder, tmp_path / "plain", dtype="float32")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    found = {each.name: each for each in GGUFReader(file).tensors}
    for layer in range(LAYERS):
        experts = f"model.layers.{layer}.mlp.experts"
        both = plain[f"{experts}.gate_up_proj"].numpy().swapaxes(1, 2)
        wanted = {"gate": both[:, ::2], "up": both[:, 1::2]}
        wanted["down"] = plain[f"{experts}.down_proj"].numpy().swapaxes(1, 2)
        for name, value in wanted.items():
            tensor = found[f"blk.{layer}.ffn_{name}_exps.weight"]
            assert tensor.tensor_type.name == "MXFP4"
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(values, value)
    packed = load_file(folder / "model.safetensors")["model.layers.0.mlp.experts.down_proj_scales"]
    blocks = found["blk.0.ffn_down_exps.weight"].data.reshape(*packed.shape, 17)
    assert (blocks[..., 0] == packed.numpy()).all()


@pytest.mark.parametrize("variant", ARCHITECTURES)
def test_a_file_becomes_the_folder_that_it_was_made_from(variant: str, model: Model, tmp_path: Path) -> None:
    folder = model(variant)
    reshard.convert(folder, tmp_path / "model.gguf")
    reshard.convert(tmp_path / "model.gguf", tmp_path / "back", base=folder, dtype="bfloat16")
    there, back = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "back"))
    there = {name: each for name, each in there.items() if f"model.layers.{LAYERS}." not in name}
    assert there.keys() == back.keys()
    assert all(back[name].dtype == each.dtype and back[name].equal(each) for name, each in there.items())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_types_are_read_bit_for_bit(dtype: str, model: Model, tmp_path: Path) -> None:
    folder = model("llama", dtype)
    reshard.convert(folder, tmp_path / "model.gguf")
    reshard.convert(tmp_path / "model.gguf", tmp_path / "back", base=folder, dtype=dtype)
    there, back = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "back"))
    assert there.keys() == back.keys() and all(back[name].equal(each) for name, each in there.items())


def test_without_dtype_norms_stay_in_float32(model: Model, tmp_path: Path) -> None:
    reshard.convert(model("llama"), tmp_path / "model.gguf")
    result = reshard.convert(tmp_path / "model.gguf", tmp_path / "back", base=model("llama"))
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back["model.norm.weight"].dtype == torch.float32
    assert back["lm_head.weight"].dtype == torch.bfloat16
    assert any("--dtype bfloat16" in note for note in result.plan.notes)


@pytest.mark.parametrize("kind", [kind.name for kind in READABLE_TYPES if not kind.is_plain])
def test_blocks_are_read_as_the_package_reads_them(kind: str, tmp_path: Path) -> None:
    """Blocks of random bytes: a scale may be NaN, or infinite."""
    number, columns = GGMLQuantizationType[kind], 512
    elements, size = gguf.GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(0).integers(0, 256, (48, columns // elements * size), dtype=np.uint8)
    writer = GGUFWriter(tmp_path / "blocks.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=number)
    finished(writer)
    tensor = reshard.open(tmp_path / "blocks.gguf").checkpoint.tensors["blk.0.ffn_up.weight"]
    with closing(OpenFiles()) as files:
        found = Gatherer(files, None).read(tensor, 0, 48 * columns).view(np.float32).reshape(tensor.shape)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(blocks, number)
    assert found.shape == (48, columns) and np.array_equal(found, wanted, equal_nan=True)


def finished(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_data_begins_where_the_alignment_of_the_file_puts_it(tmp_path: Path) -> None:
    values = np.arange(32, dtype=np.float32)
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_custom_alignment(4096)
    writer.add_tensor("output_norm.weight", values)
    finished(writer)
    tensor = reshard.open(tmp_path / "model.gguf").checkpoint.tensors["output_norm.weight"]
    with closing(OpenFiles()) as files:
        found = Gatherer(files, None).read(tensor, 0, 32).view(np.float32)
    assert np.array_equal(found, values)


def test_blocks_become_a_folder(model: Model, tmp_path: Path) -> None:
    folder, file = model("qwen3"), tmp_path / "model.gguf"
    reshard.convert(folder, file, quantize="q8_0")
    reshard.convert(file, tmp_path / "back", base=folder)
    back = load_file(tmp_path / "back" / "model.safetensors")
    for tensor in GGUFReader(file).tensors:
        if tensor.name == "blk.1.ffn_down.weight":
            wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert back["model.layers.1.mlp.down_proj.weight"].numpy().tobytes() == wanted.tobytes()
            return
    pytest.fail("the tensor is missing")


def test_any_source_gives_the_same_file(model: Model, tmp_path: Path) -> None:
    folder = model("qwen3_moe")
    reshard.convert(folder, tmp_path / "hub.gguf", quantize="q8_0")
    for name, options in {
        "megatron": {"to": "megatron", "tp": 2, "pp": 2, "ep": 2},
        "dcp": {"to": "dcp"},
        "deepspeed": {"to": "deepspeed"},
    }.items():
        reshard.convert(folder, tmp_path / name, **options)  # type: ignore[arg-type]
        reshard.convert(tmp_path / name, tmp_path / f"{name}.gguf", quantize="q8_0", base=folder)
        assert stored(tmp_path / f"{name}.gguf") == stored(tmp_path / "hub.gguf")


def test_an_adapter_is_merged_on_the_way(model: Model, tmp_path: Path) -> None:
    base = model("llama", "float32")
    adapter = make_adapter(base, tmp_path / "adapter")
    reshard.convert(adapter, tmp_path / "merged", merge=True, base=base)
    reshard.convert(tmp_path / "merged", tmp_path / "two.gguf", quantize="q8_0")
    reshard.convert(adapter, tmp_path / "one.gguf", merge=True, base=base, quantize="q8_0")
    assert stored(tmp_path / "one.gguf") == stored(tmp_path / "two.gguf")


def test_neither_torch_nor_transformers_is_imported(model: Model, tmp_path: Path) -> None:
    code = (
        "import sys, reshard; reshard.convert(sys.argv[1], sys.argv[2], quantize='q8_0');"
        "print(sorted({'torch', 'transformers', 'tokenizers'} & sys.modules.keys()))"
    )
    words = [sys.executable, "-c", code, str(model("llama")), str(tmp_path / "model.gguf")]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_parts_are_those_of_the_package(model: Model, tmp_path: Path) -> None:
    folder = model("llama")
    reshard.convert(folder, tmp_path / "one.gguf")
    reshard.convert(folder, tmp_path / "parts", to="gguf", max_shard_size="100KB")
    files = sorted((tmp_path / "parts").glob("*.gguf"))
    assert [file.name for file in files] == [f"model-{i:05d}-of-00005.gguf" for i in range(1, 6)]
    joined: dict[str, Any] = {}
    for number, file in enumerate(files):
        fields = GGUFReader(file).fields
        told = [fields[f"split.{key}"] for key in ("no", "count", "tensors.count")]
        assert [each.contents() for each in told] == [number, 5, 39]
        assert [each.types[0].name for each in told] == ["UINT16", "UINT16", "INT32"]
        assert ("general.architecture" in fields) == (number == 0)
        assert sum(len(content) for _, _, content in stored(file).values()) <= 100_000
        joined |= stored(file)
    assert joined == stored(tmp_path / "one.gguf")
    for source in (tmp_path / "parts", files[2]):
        out = tmp_path / f"from-{source.stem}"
        reshard.convert(source, out, base=folder, dtype="bfloat16")
        assert reshard.verify(folder, out)


def test_a_missing_part_is_named(model: Model, tmp_path: Path) -> None:
    reshard.convert(model("llama"), tmp_path / "parts", to="gguf", max_shard_size="100KB")
    first, *_, last = sorted((tmp_path / "parts").glob("*.gguf"))
    last.rename(tmp_path / "last.gguf")
    for path in (tmp_path / "parts", first):
        (problem,) = problems("inspect", path)
        assert problem["code"] == "gguf-split-missing" and last.name in problem["found"]
    shutil.copy(first, last)
    assert problems("inspect", first)[0]["code"] == "gguf-split-differs"
    (problem,) = problems("inspect", tmp_path / "last.gguf")
    assert problem["code"] == "gguf-split-differs" and "split.count 5" in problem["found"]


def problems(*words: object) -> list[dict[str, str]]:
    result = command(*words, "--json")
    assert result.code == 2
    found: list[dict[str, str]] = result.json["problems"]
    return found


def test_a_file_replaces_only_a_file_of_its_kind(model: Model, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    reshard.convert(model("llama"), file)
    before = file.read_bytes()
    assert problems("convert", model("qwen3"), file)[0]["code"] == "destination-exists"
    assert file.read_bytes() == before
    assert command("convert", model("qwen3"), file, "--overwrite").code == 0
    assert stored(file) == reference(model("qwen3"), "qwen3", "bf16")
    file.write_text("notes")
    assert problems("convert", model("qwen3"), file, "--overwrite")[0]["code"] == "destination-foreign-files"
    assert file.read_text() == "notes"
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_file_is_all_that_is_planned(model: Model, tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    planned = command("convert", model("llama"), file, "--dry-run").out
    assert "mine.gguf" in planned and "in 1 file\n" in planned and "reshard.json" not in planned
    told = command("convert", model("llama"), file, "--json").json
    assert told["files"] == [{"path": "mine.gguf", "bytes": file.stat().st_size}]
    assert told["bytes"] == file.stat().st_size


def test_a_file_alone_has_no_record(model: Model, tmp_path: Path) -> None:
    reshard.convert(model("llama"), tmp_path / "out.gguf")
    with pytest.raises(reshard.ReshardError) as raised:
        reshard.verify(tmp_path / "out.gguf")
    (problem,) = raised.value.problems
    assert problem.code == "record-of-single-file" and "reshard verify SRC FILE" in (problem.remedy or "")


def test_a_folder_with_the_name_of_a_file_stays_a_folder(model: Model, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").mkdir()
    assert command("convert", model("llama"), tmp_path / "model.gguf").code == 0
    names = {path.name for path in (tmp_path / "model.gguf").iterdir()}
    assert names == {"model.gguf", "reshard.json"}
    assert command("verify", tmp_path / "model.gguf").code == 0
    assert command("verify", model("llama"), tmp_path / "model.gguf", "--proof").code == 0


def test_a_run_that_was_interrupted_goes_on(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reshard.codecs import gguf_blocks

    file, call, calls = tmp_path / "model.gguf", gguf_blocks._call, [0]

    def tired(*words: Any) -> Any:
        calls[0] += 1
        if calls[0] == 20:
            raise KeyboardInterrupt
        return call(*words)

    monkeypatch.setattr(gguf_blocks, "_call", tired)
    with pytest.raises(KeyboardInterrupt):
        reshard.convert(model("llama"), file, quantize="q8_0", workers=1)
    assert not file.exists()
    reshard.convert(model("llama"), file, quantize="q8_0")
    assert stored(file) == reference(model("llama"), "llama", "q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_the_command_for_smaller_types_is_printed_last(model: Model, tmp_path: Path) -> None:
    file = tmp_path / "my model.gguf"
    told = command("convert", model("llama"), file).err.splitlines()[-1]
    assert told == f"for K-quants: llama-quantize '{file}' '{tmp_path}/my model-Q4_K_M.gguf' Q4_K_M"
    told = command("convert", model("llama"), tmp_path / "folder", "--to", "gguf").err.splitlines()[-1]
    assert told.endswith(f"{tmp_path}/folder/model.gguf {tmp_path}/folder/model-Q4_K_M.gguf Q4_K_M")
    quantized = command("convert", model("llama"), tmp_path / "q.gguf", "--quantize", "q8_0")
    assert "llama-quantize" not in quantized.err


WRONG = {
    "quantize-value-of-another-format": ("llama", "out.gguf", "--quantize", "fp8"),
    "quantized-output-unsupported": ("llama", "out", "--to", "dcp", "--quantize", "q8_0"),
    "format-without-layout": ("llama", "out.gguf", "--tp", "2"),
    "gguf-dtype-and-quantize": ("llama", "out.gguf", "--dtype", "float32", "--quantize", "q8_0"),
    "gguf-mxfp4-without-experts": ("llama", "out.gguf", "--quantize", "mxfp4"),
    "gguf-model-unsupported": ("seed_oss", "out.gguf"),
    "destination-must-be-folder": ("llama", "out.gguf", "--max-shard-size", "100KB"),
}


@pytest.mark.parametrize("code", WRONG)
def test_wrong_requests_are_refused(code: str, model: Model, tmp_path: Path) -> None:
    name, out, *flags = WRONG[code]
    (problem,) = problems("convert", model(name), tmp_path / out, *flags)
    assert problem["code"] == code and problem["remedy"]
    assert list(tmp_path.iterdir()) == []


OTHERS = {"olmo2": {}, "granite": {}, "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4}, "phi3": {}}


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_is_not_written_is_named_and_the_remedy_works(name: str, tmp_path: Path) -> None:
    """GPT-2 has no declared family, OLMo 2 none of Megatron-Core: neither is the reason here."""
    sizes = {key: value for key, value in COMMON.items() if name != "gpt2" or key == "vocab_size"}
    source = tmp_path / "source"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**sizes, **OTHERS[name]})).save_pretrained(
        source
    )
    (problem,) = problems("convert", source, tmp_path / "out.gguf", "--no-tokenizer")
    assert problem["code"] == "gguf-model-unsupported" and problem["found"] == f"model_type {name}"
    assert "--to huggingface" in problem["remedy"]
    assert command("convert", source, tmp_path / "out", "--to", "huggingface", "--no-tokenizer").code == 0


def test_a_checkpoint_without_a_config_is_named_by_its_family(tmp_path: Path) -> None:
    source = Path(__file__).parent / "data" / "internlm" / "internlm1-isp"
    (problem,) = problems("convert", source, tmp_path / "out.gguf", "--no-tokenizer")
    assert problem["code"] == "gguf-model-unsupported" and problem["found"] == "model_type internlm"


NOT_LOADED: dict[str, tuple[str, dict[str, Any]]] = {
    "tie_word_embeddings": ("gemma", {**GEMMA, "tie_word_embeddings": False}),
    "tie_word_embeddings of gpt-oss": ("gpt_oss", {**VARIANTS["gpt_oss"][1], "tie_word_embeddings": True}),
    "head_dim": ("qwen2", {"head_dim": 32}),
    "mlp_only_layers": ("qwen3_moe", {**VARIANTS["qwen3_moe"][1], "mlp_only_layers": [0]}),
    "decoder_sparse_step": ("qwen3_moe", {**VARIANTS["qwen3_moe"][1], "decoder_sparse_step": 2}),
    "q_lora_rank": VARIANTS["deepseek_v3_noq"],
    "n_group": ("deepseek_v3", {**VARIANTS["deepseek_v3"][1], "n_group": 8}),
    "topk_group": ("deepseek_v3", {**VARIANTS["deepseek_v3"][1], "n_group": 2, "topk_group": 2}),
}
"""Model types and settings with which llama.cpp loads no file; `tests/test_gguf_peer.py` lets it try."""


def make_not_loaded(key: str, folder: Path) -> Path:
    model_type, settings = NOT_LOADED[key]
    _random_model(model_type, {**COMMON, **settings}, "float32", 0).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("key", NOT_LOADED)
def test_what_llama_cpp_cannot_load_is_refused(key: str, tmp_path: Path) -> None:
    source = make_not_loaded(key, tmp_path / "source")
    (problem,) = problems("convert", source, tmp_path / "out.gguf", "--no-tokenizer")
    assert problem["code"] == "gguf-not-loadable" and key.split()[0] in problem["message"]
    assert [each.name for each in tmp_path.iterdir()] == ["source"]
    assert command("convert", source, tmp_path / "out", "--to", "huggingface", "--no-tokenizer").code == 0


def test_values_of_quantize_are_listed() -> None:
    assert tuple(STORAGES) == OF_THE_HUB
    told = command("convert", "a", "b", "--quantize", "q4_k_m")
    assert told.code == 2 and all(value in told.err for value in (*OF_THE_HUB, *QUANTIZED))
    assert "llama-quantize" in told.err or "K-quants" in told.err


def one_tensor(file: Path, number: int = 0, **more: Any) -> Path:
    """A file with a tensor of 32 float32 numbers, of another type if `number` says so."""
    writer = GGUFWriter(file, "llama")
    for key, value in more.items():
        writer.add_string(key.replace("_", "."), value)
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    finished(writer)
    content = file.read_bytes()
    at = content.index(struct.pack("<IQI", 1, 32, 0)) + 12
    file.write_bytes(content[:at] + struct.pack("<I", number) + content[at + 4 :])
    return file


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    file = one_tensor(tmp_path / "model.gguf")
    content = file.read_bytes()
    assert command("inspect", file).code == 0
    damaged = {
        "gguf-truncated": content[:-8],
        "gguf-version-unsupported": content[:4] + struct.pack("<I", 1) + content[8:],
        "gguf-header-invalid": content.replace(b"output_norm.weight", b"\xff" * 18),
    }
    for code, bad in damaged.items():
        file.write_bytes(bad)
        (problem,) = problems("inspect", file)
        assert (problem["code"], problem["file"]) == (code, str(file))
    for end in range(4, len(content) - 128, 7):
        file.write_bytes(content[:end])
        assert problems("inspect", file)[0]["code"] == "gguf-truncated"
    file.write_bytes(content[:4] + struct.pack(">I", 3) + content[8:])
    assert "big-endian" in problems("inspect", file)[0]["found"]


@pytest.mark.parametrize(("number", "found"), [(9, "Q8_1"), (77, "type 77"), (26, "I32")])
def test_a_tensor_of_another_type_is_named(number: int, found: str, tmp_path: Path) -> None:
    (problem,) = problems("inspect", one_tensor(tmp_path / "model.gguf", number))
    assert (problem["code"], problem["tensor"]) == ("gguf-type-unsupported", "output_norm.weight")
    assert problem["found"] == found


def test_the_strings_of_a_vocabulary_are_decoded_without_a_call_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of a header are read one by one; a vocabulary has hundreds of thousands of strings."""
    tokens = [f"token {number}" for number in range(100_000)]
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_token_list(tokens)
    finished(writer)
    calls, take = Counter[str](), container._Cursor.take
    counted = lambda cursor, count: calls.update(["take"]) or take(cursor, count)  # noqa: E731
    monkeypatch.setattr(container._Cursor, "take", counted)
    content = container.read(tmp_path / "model.gguf", Sources())
    assert content.metadata["tokenizer.ggml.tokens"].value == tokens
    assert calls.total() < 50


@pytest.mark.parametrize(
    ("tensors", "values"), [(0, container.MOST_VALUES + 1), (container.MOST_TENSORS + 1, 0)]
)
def test_too_many_parts_of_a_header_are_refused_before_they_are_read(
    tensors: int, values: int, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, values) + bytes(1 << 20))
    with pytest.raises(ReshardError, match=f"found: {values:,} values and {tensors:,} tensors"):
        container.read(file, Sources())


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (problem,) = problems("inspect", one_tensor(tmp_path / "mmproj.gguf", general_type="mmproj"))
    assert problem["code"] == "gguf-not-a-model" and "mmproj" in problem["found"]


def test_several_files_in_a_folder_are_listed(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        one_tensor(tmp_path / name)
    (problem,) = problems("inspect", tmp_path)
    assert problem["code"] == "gguf-several-files" and "a.gguf, b.gguf" in problem["found"]


def test_without_the_package_blocks_are_refused(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reshard.codecs import gguf_blocks

    reshard.convert(model("llama"), tmp_path / "q8_0.gguf", quantize="q8_0")
    gguf_blocks.gguf_package.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    try:
        (problem,) = problems("convert", model("llama"), tmp_path / "out.gguf", "--quantize", "q8_0")
        assert problem["code"] == "gguf-package-missing" and "gguf" in problem["remedy"]
        assert problems("inspect", tmp_path / "q8_0.gguf")[0]["code"] == "gguf-package-missing"
        assert command("convert", model("llama"), tmp_path / "out.gguf").code == 0
    finally:
        gguf_blocks.gguf_package.cache_clear()


def test_nan_is_no_number_in_blocks(model: Model, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = tmp_path / "nan"
    shutil.copytree(model("llama"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][3, 5] = math.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (problem,) = problems("convert", folder, tmp_path / "out.gguf", "--quantize", "q8_0")
    assert (problem["code"], problem["tensor"]) == ("quantized-source-not-finite", "blk.2.ffn_up.weight")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("variant", ["llama", "gemma3_text", "deepseek_v3_mtp"])
@pytest.mark.parametrize("kind", [None, "q8_0"])
def test_the_proof_balances(variant: str, kind: str | None, model: Model, tmp_path: Path) -> None:
    """What has no place in the file is dropped by a rule, which the proof counts."""
    source = model(variant)
    result = reshard.convert(source, tmp_path / "out", to="gguf", quantize=kind)
    assert command("verify", source, tmp_path / "out", "--proof").code == 0
    dropped = sum(
        each.nbytes
        for name, each in load_file(source / "model.safetensors").items()
        if f"model.layers.{LAYERS}." in name and not name.endswith(("embed_tokens.weight", "head.weight"))
    )
    assert result.plan.dropped.get("layers for multi-token prediction", 0) == dropped
