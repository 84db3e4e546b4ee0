"""`--memory` bounds all memory of every conversion: with no more than that, a process succeeds.

Tensors are larger than the bound, so a conversion that reads a complete one would fail (`bounded.py`). Other tests
judge the output; here `verify`, in as little memory, checks that it is equal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import rmtree

import numpy as np
import pytest

from tests.commandline import reshard
from tests.memory import engines, models
from tests.memory.bounded import THREADS, Ended, bounded

MIB = 1 << 20
BOUND = 56 * MIB
HUGGINGFACE = ("--to", "huggingface")
MERGED = ("--merge", "--base", "@llama")
STATES = ("--with-optimizer",)

Road = tuple[str, tuple[str, ...], str]
"""The source, flags, in which @NAME is a folder, and the folder with the same weights, or none."""

FAST: dict[str, Road] = {
    "cast": ("llama", (*HUGGINGFACE, "--dtype", "float32"), ""),
    "mxfp4": ("gpt_oss", (*HUGGINGFACE, "--quantize", "mxfp4"), ""),
    "lora": ("adapter", MERGED, ""),
    "zero3-cast": ("zero-3", ("--to", "megatron", "--tp", "2", "--dtype", "bfloat16"), ""),
}
ROADS: dict[str, Road] = {
    "copy": ("llama", (*HUGGINGFACE, "--max-shard-size", "100MB"), "llama"),
    "megatron": ("llama", ("--to", "megatron", "--tp", "2"), "llama"),
    "megatron-back": ("megatron", (), "llama"),
    "legacy": ("llama", ("--to", "megatron-legacy", "--tp", "2"), "llama"),
    "legacy-back": ("legacy", ("--dtype", "float32"), ""),
    "dcp": ("llama", ("--to", "dcp"), "llama"),
    "dcp-back": ("dcp", (), "llama"),
    "deepspeed": ("llama", ("--to", "deepspeed"), ""),
    "deepspeed-back": ("deepspeed", ("--dtype", "bfloat16"), "llama"),
    "transposed": ("gpt_oss", ("--to", "megatron", "--ep", "2"), "gpt_oss"),
    "transposed-back": ("transposed", (), "gpt_oss"),
    "fp8": ("llama", (*HUGGINGFACE, "--quantize", "fp8"), "llama"),
    "fp8-back": ("fp8", (*HUGGINGFACE, "--dtype", "bfloat16"), "fp8"),
    "fp8-row-parallel": ("fp8", ("--to", "megatron", "--tp", "2", "--dtype", "bfloat16"), ""),
    "mxfp4-back": ("mxfp4", (*HUGGINGFACE, "--dtype", "bfloat16"), "mxfp4"),
    "mxfp4-transposed": ("mxfp4", ("--to", "megatron", "--ep", "2"), ""),
    "gptq": ("gptq", (*HUGGINGFACE, "--dtype", "bfloat16"), ""),
    "awq": ("awq", (*HUGGINGFACE, "--dtype", "float16"), ""),
    "awq-row-parallel": ("awq", ("--to", "megatron", "--tp", "2"), ""),
    "nf4": ("nf4", (*HUGGINGFACE, "--dtype", "bfloat16"), ""),
    "int8": ("int8", (*HUGGINGFACE, "--dtype", "bfloat16"), ""),
    "dora": ("dora", MERGED, ""),
    "lora-of-fp8": ("adapter", ("--merge", "--base", "@fp8", "--dtype", "bfloat16"), ""),
    "lora-to-megatron": ("adapter", (*MERGED, "--to", "megatron", "--tp", "2"), ""),
    "lora-in-float32": ("adapter", (*MERGED, "--dtype", "float32"), ""),
    "lora-of-awq": ("adapter", ("--merge", "--base", "@awq", "--dtype", "bfloat16"), ""),
    "dora-of-fp8": ("dora", ("--merge", "--base", "@fp8", "--dtype", "bfloat16"), ""),
    "dora-to-megatron": ("dora", (*MERGED, "--to", "megatron", "--tp", "2"), ""),
    "adapter-cast": ("wide", ("--to", "peft", "--dtype", "bfloat16"), ""),
    "adapter-to-megatron": ("wide", ("--to", "megatron", "--tp", "2", "--base", "@llama"), ""),
    "adapter-back": ("adapter-to-megatron", ("--to", "peft", "--base", "@llama"), "wide"),
    "zero1": ("zero-1", HUGGINGFACE, "plain"),
    "zero2": ("zero-2", ("--to", "megatron", "--tp", "2"), "plain"),
    "zero3": ("zero-3", HUGGINGFACE, "plain"),
    "zero2-states": ("zero-2", ("--to", "megatron", "--tp", "2", *STATES), "plain"),
    "zero3-states": ("zero-3", ("--to", "dcp", *STATES), "plain"),
    "states-back": ("zero2-states", ("--to", "deepspeed", *STATES), "plain"),
    "fsdp-ranks": ("fsdp", HUGGINGFACE, "plain"),
    "fsdp-ranks-to-megatron": ("fsdp", ("--to", "megatron", "--tp", "2"), "plain"),
    "fsdp-ranks-to-ranks": ("fsdp", ("--to", "fsdp-ranks", "--dp", "3"), "plain"),
    "many": ("many", HUGGINGFACE, "many"),
}
"""Conversions that may start from the output of an earlier one."""

MAKERS: dict[str, Callable[[Path], Path]] = {
    **{make.__name__: make for make in (models.llama, models.gpt_oss, models.adapter, models.many)},
    **{make.__name__: make for make in (models.gptq, models.awq, models.nf4, models.int8)},
    "dora": lambda folder: models.adapter(folder, use_dora=True),
    "wide": lambda folder: models.adapter(folder, rank=512),
    "zero-1": engines.zero1,
    "zero-2": engines.zero2,
    "zero-3": engines.zero3,
    **{make.__name__: make for make in (engines.fsdp, engines.plain)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Sources, made when first requested, and their conversions."""
    made = tmp_path_factory.mktemp("memory")
    yield made
    rmtree(made)


def ready(folder: Path, name: str) -> Path:
    """A folder by its name, made or converted unless it exists."""
    path = folder / name
    if not path.exists():
        if name in MAKERS:
            return MAKERS[name](path)
        carry(folder, name)
    return path


def carry(folder: Path, name: str) -> None:
    """Run a conversion within the bound."""
    source, flags, same = {**FAST, **ROADS}[name]
    words = [ready(folder, word[1:]) if word.startswith("@") else word for word in flags]
    target = folder / name
    ended = bounded(
        BOUND, "convert", ready(folder, source), target, *words, "--no-tokenizer", "--workers", THREADS
    )
    assert_within(ended)
    if same:
        assert_within(bounded(BOUND, "verify", target, ready(folder, same)))


def assert_within(ended: Ended, bound: int = BOUND) -> None:
    """Assert that the command succeeded, and its resident memory rose by no more than the bound."""
    assert ended.code == 0, ended.err
    assert 0 < ended.taken <= bound, f"{ended.taken / MIB:.1f} MiB"


@pytest.mark.parametrize("name", FAST)
@pytest.mark.thorough
def test_a_road_keeps_within_the_bound(folder: Path, name: str) -> None:
    ready(folder, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROADS)
def test_every_road_keeps_within_the_bound(folder: Path, name: str) -> None:
    ready(folder, name)


@pytest.mark.slow
def test_a_folder_is_verified_within_the_bound(folder: Path) -> None:
    assert_within(bounded(16 * MIB, "verify", ready(folder, "lora")), 16 * MIB)


@pytest.mark.slow
def test_a_road_that_holds_a_tensor_dies_of_it(folder: Path) -> None:
    """A conversion can fail: with less memory than the bound, the error is clear and nothing is written."""
    target = folder / "too-large"
    ended = bounded(1 << 30, "convert", ready(folder, "llama"), target, *HUGGINGFACE, "--dtype", "float32",
                    "--no-tokenizer", "--json", limit=10 * MIB)  # fmt: skip
    assert ended.code == 2 and "Traceback" not in ended.err
    (problem,) = json.loads(ended.out)["problems"]
    assert problem["message"] == "the system has no memory left" and "--memory" in problem["remedy"]
    assert not target.exists()


@pytest.mark.slow
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_what_does_not_fit_is_refused_with_the_number_that_would(folder: Path, dry: tuple[str, ...]) -> None:
    """The number that the refusal names is enough."""
    target = folder / "refused"
    words = ("convert", ready(folder, "adapter"), target, "--merge", "--base", ready(folder, "llama"))
    words = (*words, "--no-tokenizer", "--json", *dry)
    refused = bounded(20 * MIB, *words)
    (problem,) = json.loads(refused.out)["problems"]
    assert refused.code == 2 and problem["tensor"] == "model.layers.0.mlp.down_proj.weight"
    assert problem["message"] == "the memory limit is too low"
    assert "--memory 20MiB" in problem["found"] and not target.exists()
    number = int(re.fullmatch(r"pass --memory (\d+)MiB", problem["remedy"])[1])  # type: ignore[index]
    assert_within(bounded(number * MIB, *words), number * MIB)
    rmtree(target, ignore_errors=True)


@pytest.mark.slow
def test_a_tokenizer_is_copied_without_being_loaded(folder: Path, tmp_path: Path) -> None:
    """It is parsed only if its number of tokens matters: if Megatron's embedding has other rows than the config."""
    source, padded, back = tmp_path / "model", tmp_path / "padded", tmp_path / "back"
    models.make(source, {**models.LLAMA, "intermediate_size": 64, "vocab_size": 1000})
    words = {f"word{i}": i for i in range(1000)}
    text = json.dumps({"model": {"type": "BPE", "vocab": words, "merges": []}, "padding": "x" * (6 * MIB)})
    (source / "tokenizer.json").write_text(text)
    there = bounded(56 * MIB, "convert", source, padded, "--to", "megatron", "--json")
    assert_within(there)
    assert any("tokenizer.json is copied without" in note for note in json.loads(there.out)["notes"])
    (copied,) = padded.rglob("tokenizer.json")
    assert copied.read_text() == text
    refused = bounded(56 * MIB, "convert", padded, back, "--json")
    (problem,) = json.loads(refused.out)["problems"]
    assert refused.code == 2 and problem["file"] == str(copied)
    number = int(re.fullmatch(r"pass --memory (\d+)MiB", problem["remedy"])[1])  # type: ignore[index]
    assert_within(bounded(number * MIB, "convert", padded, back), number * MIB)
    assert json.loads((back / "config.json").read_text())["vocab_size"] == 1000


@pytest.mark.parametrize("command", ["convert", "verify"])
def test_words_that_are_no_size(folder: Path, tmp_path: Path, command: str) -> None:
    source = models.many(tmp_path / "model", 2)
    result = reshard(command, source, tmp_path / "out", "--memory", "plenty", "--json")
    assert result.code == 2 and result.json["problems"][0]["message"] == "--memory is not a size"


def test_bits_are_numbers() -> None:
    """No random tensor may contain NaN, which would differ from itself."""
    halves = np.frombuffer(models.BITS, np.uint16)
    assert np.isfinite(halves.view(np.float16)).all()
    assert np.isfinite((halves.astype(np.uint32) << 16).view(np.float32)).all()
