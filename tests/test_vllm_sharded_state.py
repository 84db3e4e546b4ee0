"""vLLM's sharded_state: the same model as on the Hub, bit for bit, and refused where vLLM has arranged its weights.

The folders in tests/data/vllm are what vLLM 0.32 saved of `hub` (`save`): on a CPU (`packed`), and with the weights as
they are on a GPU (`tp2`), whose two ranks have the same KV head.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from tests.commandline import reshard as command
from tests.environments import python
from tests.genuine.huggingface import edit_config
from tests.judges import tensors_of

DATA = Path(__file__).parent / "data/vllm"
UNPACKED = {"worker_extension_cls": "tests.genuine.vllm_unpacked.Extension"}
SIZES = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
"""Heads that vLLM's attention for CPUs has."""
LAST = "model-rank-1-part-0.safetensors"
Tensors = dict[str, torch.Tensor]


def assert_is(found: Path, expected: Path, out: Path) -> None:
    """A checkpoint has the tensors of a Hugging Face folder."""
    reshard.convert(found, out, to="huggingface")
    ours, theirs = tensors_of(out), tensors_of(expected)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_ranks_are_joined(tmp_path: Path) -> None:
    assert_is(DATA / "tp2", DATA / "hub", tmp_path / "out")
    told = command("inspect", DATA / "tp2", "--json").json
    assert (told["format"], told["variant"]) == ("vllm-sharded-state", "TP 2")


def test_a_file_of_a_rank_stands_for_all(tmp_path: Path) -> None:
    assert_is(DATA / "tp2" / LAST, DATA / "hub", tmp_path / "out")


def test_parts_of_a_rank_are_joined(tmp_path: Path) -> None:
    """As with the argument max_size."""
    folder = shutil.copytree(DATA / "tp2", tmp_path / "parts")
    held = load_file(folder / LAST)
    halves: tuple[Tensors, Tensors] = ({}, {})
    for index, (name, tensor) in enumerate(held.items()):
        halves[index % 2][name] = tensor
    for part, half in enumerate(halves):
        save_file(half, folder / f"model-rank-1-part-{part}.safetensors")
    assert_is(folder, DATA / "hub", tmp_path / "out")


def edited(folder: Path, change: Callable[[Tensors], object]) -> None:
    held = load_file(folder / LAST)
    change(held)
    save_file(held, folder / LAST)


QKV = "model.layers.1.self_attn.qkv_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
WRONG: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a rank": ("vllm-sizes-differ", lambda folder: edit_config(folder, {"num_attention_heads": 5})),
    "no size": ("vllm-sizes-differ", lambda folder: edit_config(folder, {"vocab_size": "many"})),
    "a small vocabulary": ("vllm-sizes-differ", lambda folder: edit_config(folder, {"vocab_size": 1000})),
    "rows": (
        "vllm-sizes-differ",
        lambda folder: edited(folder, lambda held: held.update({QKV: held[QKV][:-1]})),
    ),
    "the first": ("rank-file-missing", lambda folder: (folder / LAST.replace("1", "0", 1)).unlink()),
    "a part": ("rank-parts-misfit", lambda folder: edited(folder, lambda held: held.pop(QKV))),
    "a name": (
        "vllm-tensor-unknown",
        lambda folder: edited(folder, lambda held: held.update(w13=held[NORM].clone())),
    ),
    "a dtype": (
        "vllm-tensor-unknown",
        lambda folder: edited(folder, lambda held: held.update({QKV: held[QKV].to(torch.float8_e4m3fn)})),
    ),
    "experts": ("vllm-model-unsupported", lambda folder: edit_config(folder, {"model_type": "qwen3_moe"})),
    "quantized": (
        "vllm-model-unsupported",
        lambda folder: edit_config(folder, {"quantization_config": {"a": 1}}),
    ),
    "no config": ("vllm-model-unsupported", lambda folder: (folder / "config.json").unlink()),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    code, change = WRONG[name]
    folder = shutil.copytree(DATA / "tp2", tmp_path / "src")
    change(folder)
    result = command("inspect", folder, "--json")
    assert (result.code, result.json["problems"][0]["code"]) == (2, code), result.err


def test_what_vllm_saves_on_a_cpu_is_refused() -> None:
    result = command("inspect", DATA / "packed", "--json")
    assert (result.code, result.json["problems"][0]["code"]) == (2, "vllm-weights-packed")


HEAD = "lm_head.weight"
COPIES: dict[str, Callable[[Tensors], object]] = {
    "a norm": lambda held: held[NORM].add_(1),
    "a KV head": lambda held: held[QKV][-1].add_(1),
    "padding": lambda held: held[HEAD][-1].add_(1),
}


@pytest.mark.parametrize("name", COPIES)
def test_what_must_be_equal_is_compared(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "tp2", tmp_path / "src")
    edited(folder, COPIES[name])
    result = command("convert", folder, tmp_path / "out", "--to", "huggingface", "--json")
    assert (result.code, result.json["problems"][0]["code"]) == (2, "copies-differ"), result.err
    assert not (tmp_path / "out").exists()


def test_a_copy_of_another_rank_is_found(tmp_path: Path) -> None:
    """Safetensors have no checksums: the contents are compared."""
    folder = shutil.copytree(DATA / "tp2", tmp_path / "src")
    first = LAST.replace("1", "0", 1)
    shutil.copy(folder / first, folder / LAST)
    result = command("convert", folder, tmp_path / "out", "--to", "huggingface", "--json")
    problem = next(each for each in result.json["problems"] if each["code"] == "rank-file-copied")
    assert result.code == 2
    assert problem["file"].endswith(LAST)
    assert problem["found"].endswith(first)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("release", ["vllm", "vllm-0.31"])
def test_what_vllm_saves_of_a_model_becomes_that_model(
    release: str, hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    models = {name: hf_model(name, **SIZES) for name in ("qwen3", "llama_tied", "mistral")}
    models["qwen2"] = hf_model("qwen2", **{**SIZES, "hidden_size": 128})  # vLLM's has no head_dim of its own
    one_group = hf_model("llama", **{**SIZES, "num_key_value_heads": 1})
    one: list[tuple[Path, str, dict[str, Any]]] = [(models["qwen3"], "one rank", {})]
    two: list[tuple[Path, str, dict[str, Any]]] = [
        (models["llama_tied"], "tied", {"tensor_parallel_size": 2}),
        (models["qwen2"], "biases", {"tensor_parallel_size": 2}),
        (models["mistral"], "mistral", {"tensor_parallel_size": 2}),
        (one_group, "one group", {"tensor_parallel_size": 2}),
    ]
    cases = [*one, *(two if release == "vllm" else [])]  # a start of two ranks takes minutes
    told = json.dumps([[str(model), str(tmp_path / name), {**UNPACKED, **how}] for model, name, how in cases])
    words = [python(release), "-m", "tests.genuine.save_sharded_state", told]
    ran = subprocess.run(words, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    for model, name, _ in cases:
        assert_is(tmp_path / name, model, tmp_path / f"out {name}")
