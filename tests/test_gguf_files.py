"""llama.cpp judges GGUF files in other types than float32: those that reshard writes, and those that it reads.

`tests/test_gguf_peer.py` compares the files in float32, and the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from reshard.transfer.gather import Gatherer
from reshard.transfer.thread_files import OpenFiles
from tests.genuine.gguf_models import FAMILIES
from tests.genuine.llama_cpp import run, source
from tests.test_gguf_peer import Peer, assert_same_logits, peer

pytestmark = pytest.mark.slow
__all__ = ["peer"]

Read = tuple[dict[str, Any], dict[str, Any]]
TYPES = [
    (family, kind)
    for family in ("llama", "qwen3_moe", "deepseek_v3")
    for kind in ("bf16", "f16", "q8_0", "tq2_0")
]
HALVES = [
    *(("llama", "bfloat16"), ("gemma3", "bfloat16")),
    *(("gemma", "float16"), ("gemma2", "float16"), ("gemma3", "float16")),
]
K_QUANTS = {"Q4_K_M": 15, "Q2_K": 10, "IQ4_XS": 30, "Q6_K": 18}
"""Types of files by their number in llama.h, none of which the package gguf writes."""


@pytest.fixture(scope="module")
def others(peer: Peer) -> Path:
    """Files of the converter in other types, of models in bfloat16 or with experts in MXFP4, and of K-quants."""
    folder = peer.folder / "others"
    folder.mkdir()
    jobs: list[Sequence[object]] = [
        [
            "convert",
            source(),
            peer.model(family),
            folder / f"{family}-{kind}.gguf",
            kind,
            FAMILIES[family].pre,
        ]
        for family, kind in TYPES
    ]
    for family, dtype in HALVES:
        halves = folder / f"{family}-{dtype}" / peer.model(family).name
        reshard.convert(peer.model(family), halves, dtype=dtype)
        file = folder / f"half-{family}-{dtype}.gguf"
        jobs.append(["convert", source(), halves, file, "auto", FAMILIES[family].pre])
    packed = folder / "packed" / peer.model("gpt_oss").name
    reshard.convert(peer.model("gpt_oss"), folder / "halves", dtype="bfloat16")
    reshard.convert(folder / "halves", packed, quantize="mxfp4")
    for kind in ("auto", "f32", "q8_0"):
        jobs.append(
            ["convert", source(), packed, folder / f"packed-{kind}.gguf", kind, FAMILIES["gpt_oss"].pre]
        )
    reshard.convert(wide(peer, folder / "wide"), folder / "wide.gguf")
    for name, number in K_QUANTS.items():
        jobs.append(["quantize", folder / "wide.gguf", folder / f"wide-{name}.gguf", number])
    reshard.convert(peer.model("qwen2"), folder / "parts", to="gguf", max_shard_size="150KB")
    first = min((folder / "parts").glob("*.gguf"))
    jobs.append(["logits", first, peer.folder / "ids.npy", folder / "parts.npy"])
    run(*jobs)
    return folder


def wide(peer: Peer, folder: Path) -> Path:
    """A folder with rows of 256 elements, the blocks of K-quants."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(peer.model("llama"))
    config.hidden_size, config.intermediate_size, config.head_dim = 256, 512, 64
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(peer.model("llama")).save_pretrained(folder)
    return folder


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


@pytest.mark.parametrize(("family", "kind"), TYPES)
def test_other_types_are_those_of_the_converter(
    family: str, kind: str, peer: Peer, others: Path, tmp_path: Path
) -> None:
    reshard.convert(peer.model(family), tmp_path / "ours.gguf", quantize=kind)
    assert_same(tmp_path / "ours.gguf", others / f"{family}-{kind}.gguf")


@pytest.mark.parametrize("kind", ["auto", "f32", "q8_0"])
def test_mxfp4_of_gpt_oss_is_that_of_the_converter(
    kind: str, peer: Peer, others: Path, tmp_path: Path
) -> None:
    folder = others / "packed" / peer.model("gpt_oss").name
    reshard.convert(folder, tmp_path / "ours.gguf", quantize=None if kind == "auto" else kind)
    assert_same(tmp_path / "ours.gguf", others / f"packed-{kind}.gguf")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_converter_wrote_becomes_the_folder(family: str, peer: Peer, tmp_path: Path) -> None:
    """Norms of Gemma are rounded where the converter adds one."""
    folder = peer.model(family)
    options = {"dtype": "float32"} if family.startswith("gemma") else {}
    reshard.convert(peer.file(family), tmp_path / "back", base=folder, **options)  # type: ignore[arg-type]
    there, back = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "back"))
    assert there.keys() == back.keys()
    shifted = {name for name in there if family.startswith("gemma") and name.endswith("norm.weight")}
    assert all(back[name].equal(there[name]) for name in there.keys() - shifted)
    assert all(torch.allclose(back[name], there[name], rtol=0, atol=3e-7) for name in shifted)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_halves_that_the_converter_wrote_become_the_folder(
    family: str, peer: Peer, others: Path, tmp_path: Path
) -> None:
    folder = others / f"{family}-bfloat16" / peer.model(family).name
    reshard.convert(others / f"half-{family}-bfloat16.gguf", tmp_path / "back", base=folder, dtype="bfloat16")
    there, back = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "back"))
    assert there.keys() == back.keys() and all(back[name].equal(each) for name, each in there.items())


@pytest.mark.parametrize(("family", "dtype"), HALVES)
def test_models_in_16_bits_become_the_file_of_the_converter(
    family: str, dtype: str, others: Path, tmp_path: Path
) -> None:
    """The norms of a Gemma in float16 are rounded in float16 when one is added."""
    (folder,) = (others / f"{family}-{dtype}").iterdir()
    reshard.convert(folder, tmp_path / "ours.gguf")
    assert_same(tmp_path / "ours.gguf", others / f"half-{family}-{dtype}.gguf")


def test_llama_cpp_loads_all_parts(peer: Peer, others: Path) -> None:
    assert len([*(others / "parts").glob("*.gguf")]) > 1
    assert_same_logits(np.load(others / "parts.npy"), peer, "qwen2")


@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants_are_read(kind: str, others: Path, tmp_path: Path) -> None:
    """llama.cpp quantizes an output of reshard, and reshard reads what it wrote."""
    file = others / f"wide-{kind}.gguf"
    tensors = reshard.open(file).checkpoint.tensors
    read_blocks = 0
    with closing(OpenFiles()) as files:
        for each in GGUFReader(file).tensors:
            if each.name not in tensors:
                continue  # rotary frequencies
            wanted = gguf.quants.dequantize(each.data, each.tensor_type)
            tensor = tensors[each.name]
            found = Gatherer(files, None).read(tensor, 0, tensor.view.numel)
            assert found.view(np.float32).tobytes() == np.ascontiguousarray(wanted).tobytes(), each.name
            read_blocks += each.tensor_type.name not in ("F32", "F16", "BF16")
    assert read_blocks > 10
    reshard.convert(file, tmp_path / "back", base=others / "wide", dtype="bfloat16")
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == reshard.open(others / "wide").keys()
