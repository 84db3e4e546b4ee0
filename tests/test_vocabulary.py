"""Which rows of a padded embedding are padding: fewer than Megatron's unit, and beyond that only zeros."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard.base.errors import ReshardError
from tests.genuine.megatron import Genuine
from tests.judges import tensors_of

Maker = Callable[..., Genuine]
EMBEDDING = "model.embed_tokens.weight"


def counting(base: Path, tokens: int) -> Path:
    """The folder, after its config counts `tokens`."""
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "vocab_size": tokens}))
    return base


def with_arguments(source: Genuine, run: Path, **changes: Any) -> Path:
    """A copy of the genuine checkpoint, with other arguments; with none at all if nothing changes."""
    shutil.copytree(source.roots["torch_dist"], run)
    common = run / source.iteration().name / "common.pt"
    content = torch.load(common, weights_only=False)
    if changes:
        vars(content["args"]).update(changes)
    else:
        del content["args"]
    torch.save(content, common)
    return run


@pytest.fixture
def base(genuine: Maker, tmp_path: Path) -> Path:
    """The Hugging Face folder of the genuine checkpoints, whose 250 tokens have 256 rows: a unit of 64 times TP."""
    reshard.convert(genuine("qwen2-tp2-pp2").roots["torch_dist"], tmp_path / "base", no_tokenizer=True)
    return tmp_path / "base"


@pytest.mark.parametrize("format", ["torch_dist", "torch"])
def test_tokens_that_the_arguments_count_are_kept_whatever_the_base_says(
    format: str, base: Path, genuine: Maker, tmp_path: Path
) -> None:
    """200 tokens would be padded to 256 rows as well, but the run had 250."""
    expected = tensors_of(base)[EMBEDDING]
    run = genuine("qwen2-tp2-pp2").roots[format]
    plan = reshard.convert(run, tmp_path / "out", base=counting(base, 200), no_tokenizer=True).plan
    assert torch.equal(tensors_of(tmp_path / "out")[EMBEDDING], expected)
    assert any("vocab_size: 250 as the checkpoint's arguments have, not 200" in note for note in plan.notes)


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("qwen2-tp2-pp2", {"vocab_size": None}),
        ("qwen2-tp2-pp2", {"vocab_size": None, "make_vocab_size_divisible_by": 8}),
        ("qwen2-tied-pp2", {}),
    ],
    ids=["a tokenizer's", "a smaller unit", "no arguments"],
)
def test_more_rows_than_padding_are_refused(
    name: str, arguments: dict[str, Any], genuine: Maker, tmp_path: Path
) -> None:
    """100 tokens are padded to 128, to 112, and without arguments to 228 rows at most, and there are 256."""
    source = genuine(name)
    base = tmp_path / "base"
    reshard.convert(source.roots["torch_dist"], base, no_tokenizer=True)
    run = with_arguments(source, tmp_path / "run", **arguments)
    with pytest.raises(ReshardError, match="the vocabulary") as caught:
        reshard.convert(run, tmp_path / "out", base=counting(base, 100), no_tokenizer=True)
    assert "set vocab_size to 256" in str(caught.value)
    reshard.convert(run, tmp_path / "all", base=counting(base, 256), no_tokenizer=True)
    assert tensors_of(tmp_path / "all")[EMBEDDING].shape[0] == 256


def test_padding_of_a_run_without_arguments_is_dropped(base: Path, genuine: Maker, tmp_path: Path) -> None:
    run = with_arguments(genuine("qwen2-tp2-pp2"), tmp_path / "run")
    reshard.convert(run, tmp_path / "out", base=base, no_tokenizer=True)
    assert reshard.verify(tmp_path / "out", base).equal


def test_rows_beyond_padding_are_dropped_if_they_are_zeros(
    hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(hf_model("qwen2", vocab_size=300), tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    for name in (EMBEDDING, "lm_head.weight"):
        tensors[name][290:] = 0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    reshard.convert(model, tmp_path / "mc", to="megatron", vocab_divisible_by=1)
    arguments = reshard.open(tmp_path / "mc").checkpoint.description.args
    assert (arguments["make_vocab_size_divisible_by"], arguments["vocab_size"]) == (1, 300)
    for tokens, rows in ((290, 290), (289, 300)):
        reshard.convert(tmp_path / "mc", tmp_path / f"{tokens}", base=counting(model, tokens))
        assert tensors_of(tmp_path / f"{tokens}")[EMBEDDING].shape[0] == rows


def test_an_embedding_with_another_name_is_named(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(hf_model("llama"), tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_token.weight"] = tensors.pop(EMBEDDING)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ReshardError) as caught:
        reshard.convert(source, tmp_path / "out", to="megatron")
    (problem,) = caught.value.problems
    assert (problem.tensor, problem.found) == (EMBEDDING, "model.embed_token.weight")
