"""llama.cpp judges complete GGUF files: its converter writes the same, and its library computes the same logits."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file

import reshard
from reshard.transfer.files import Files
from reshard.transfer.gather import Gatherer
from tests.environments import python
from tests.genuine.gguf_models import FAMILIES
from tests.genuine.llama_cpp import convert_with_llama_cpp
from tests.test_gguf_peer import assert_same_logits, made, theirs

pytestmark = pytest.mark.slow
__all__ = ["made", "theirs"]

Read = tuple[dict[str, Any], dict[str, Any]]


def read(file: Path) -> Read:
    """The metadata and the tensors of a file, as the package reads them."""
    reader = GGUFReader(file)
    values = {
        key: ([each.name for each in field.types], field.contents())
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.")
    }
    tensors = {
        each.name: (each.tensor_type, [int(size) for size in each.shape], each.data.tobytes())
        for each in reader.tensors
    }
    return values, tensors


def assert_same(ours: Path, reference: Path) -> None:
    (values, tensors), (expected, there) = read(ours), read(reference)
    assert [name for name in tensors.keys() | there.keys() if tensors.get(name) != there.get(name)] == []
    assert [key for key in values.keys() | expected.keys() if values.get(key) != expected.get(key)] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_that_of_the_converter(family: str, made: Any, theirs: Any, tmp_path: Path) -> None:
    reshard.convert(made(family), tmp_path / "ours.gguf")
    assert_same(tmp_path / "ours.gguf", theirs(family))
    assert_same_logits(tmp_path / "ours.gguf", made(family), tmp_path)


@pytest.mark.parametrize("kind", ["bf16", "f16", "q8_0", "tq2_0"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_other_types_are_those_of_the_converter(family: str, kind: str, made: Any, tmp_path: Path) -> None:
    folder = made(family)
    convert_with_llama_cpp(folder, tmp_path / "theirs.gguf", kind, FAMILIES[family].pre)
    reshard.convert(folder, tmp_path / "ours.gguf", quantize=kind)
    assert_same(tmp_path / "ours.gguf", tmp_path / "theirs.gguf")


@pytest.mark.parametrize("kind", ["auto", "f32", "q8_0"])
def test_mxfp4_of_gpt_oss_is_that_of_the_converter(kind: str, made: Any, tmp_path: Path) -> None:
    folder = tmp_path / made("gpt_oss").name
    reshard.convert(made("gpt_oss"), tmp_path / "halves", dtype="bfloat16")
    reshard.convert(tmp_path / "halves", folder, quantize="mxfp4")
    convert_with_llama_cpp(folder, tmp_path / "theirs.gguf", kind, FAMILIES["gpt_oss"].pre)
    reshard.convert(folder, tmp_path / "ours.gguf", quantize=None if kind == "auto" else kind)
    assert_same(tmp_path / "ours.gguf", tmp_path / "theirs.gguf")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_converter_wrote_becomes_the_folder(
    family: str, made: Any, theirs: Any, tmp_path: Path
) -> None:
    folder = made(family)
    reshard.convert(theirs(family), tmp_path / "back", base=folder)
    there, back = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "back"))
    assert there.keys() == back.keys()
    shifted = {name for name in there if family == "gemma3" and name.endswith("norm.weight")}
    assert all(back[name].equal(there[name]) for name in there.keys() - shifted)
    assert all(torch.allclose(back[name], there[name], rtol=0, atol=1e-7) for name in shifted)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_halves_that_the_converter_wrote_become_the_folder(family: str, made: Any, tmp_path: Path) -> None:
    folder = tmp_path / made(family).name
    reshard.convert(made(family), folder, dtype="bfloat16")
    convert_with_llama_cpp(folder, tmp_path / "theirs.gguf", "bf16", FAMILIES[family].pre)
    reshard.convert(tmp_path / "theirs.gguf", tmp_path / "back", base=folder, dtype="bfloat16")
    there, back = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "back"))
    assert there.keys() == back.keys() and all(back[name].equal(each) for name, each in there.items())


def test_llama_cpp_loads_all_parts(made: Any, tmp_path: Path) -> None:
    reshard.convert(made("qwen2"), tmp_path / "parts", to="gguf", max_shard_size="150KB")
    first, *others = sorted((tmp_path / "parts").glob("*.gguf"))
    assert others
    assert_same_logits(first, made("qwen2"), tmp_path)


K_QUANTS = {"Q4_K_M": 15, "Q2_K": 10, "IQ4_XS": 30, "Q6_K": 18}
"""Types of files by their number in llama.h, none of which the package gguf writes."""

QUANTIZE = """
import sys, llama_cpp
parameters = llama_cpp.llama_model_quantize_default_params()
parameters.ftype, parameters.nthread = int(sys.argv[3]), 1
assert not llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), parameters)
"""


@pytest.fixture(scope="module")
def wide(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with rows of 256 elements, the blocks of K-quants."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("wide")
    config = AutoConfig.from_pretrained(made("llama"))
    config.hidden_size, config.intermediate_size, config.head_dim = 256, 512, 64
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(made("llama")).save_pretrained(folder)
    yield folder


@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants_are_read(kind: str, wide: Path, tmp_path: Path) -> None:
    """llama.cpp quantizes an output of reshard, and reshard reads what it wrote."""
    reshard.convert(wide, tmp_path / "plain.gguf")
    words = [tmp_path / "plain.gguf", tmp_path / "small.gguf", K_QUANTS[kind]]
    subprocess.run([python("llama-cpp"), "-c", QUANTIZE, *map(str, words)], check=True, timeout=300)
    tensors = reshard.open(tmp_path / "small.gguf").checkpoint.tensors
    read_blocks = 0
    with closing(Files()) as files:
        for each in GGUFReader(tmp_path / "small.gguf").tensors:
            if each.name not in tensors:
                continue  # rotary frequencies
            wanted = gguf.quants.dequantize(each.data, each.tensor_type)
            tensor = tensors[each.name]
            found = Gatherer(files, None).read(tensor, 0, tensor.view.numel)
            assert found.view(np.float32).tobytes() == np.ascontiguousarray(wanted).tobytes(), each.name
            read_blocks += each.tensor_type.name not in ("F32", "F16", "BF16")
    assert read_blocks > 10
    reshard.convert(tmp_path / "small.gguf", tmp_path / "back", base=wide, dtype="bfloat16")
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == reshard.open(wide).keys()
