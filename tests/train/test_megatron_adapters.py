"""LoRA on megatron-core: the same in every layout, an unchanged base, and PEFT computes the same as Megatron."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import reshard
from reshard.algebra.layout import Layout
from reshard.engines.megatron.session import RankError
from reshard.training import megatron
from reshard.training.engine import Trained
from reshard.training.run import Run
from tests.train.megatron import EPSILON, Seen, mean_loss, run_of, train, write_chats

Tiny = Callable[..., Path]
Runs = Callable[[str], tuple[Run, Seen, Trained]]
LORA = {"lora": True, "lora_r": 4, "lora_alpha": 12, "lr": 1e-2}
CASES = {
    "qwen3 at TP2": ("qwen3", 2, Layout(tp=2)),
    "qwen3 at TP2·PP2": ("qwen3", 4, Layout(tp=2, pp=2)),
    "qwen3 on one rank": ("qwen3", 1, Layout()),
    "qwen2 at TP2": ("qwen2", 2, Layout(tp=2)),
    "qwen3_moe at EP2": ("qwen3_moe", 2, Layout(ep=2)),
    "qwen3 of one query group at TP4": ("qwen3", 4, Layout(tp=4)),
    "qwen3 of one query group on one rank": ("qwen3", 1, Layout()),
}


@pytest.fixture(scope="module")
def runs(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A case, trained once, and saved one step before its end, so that the last loss is that of the saved weights."""

    @cache
    def get(name: str) -> tuple[Run, Seen, Trained]:
        model, world_size, layout = CASES[name]
        folder = tmp_path_factory.mktemp("lora")
        data = write_chats(folder)
        sizes = {"num_key_value_heads": 1} if "one query group" in name else {}
        run = run_of(tiny(model, **sizes), data, folder / "out", layout, **LORA)
        return run, *train(run, world_size)

    return get


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        ("qwen3 at TP2", "qwen3 on one rank"),
        pytest.param("qwen3 at TP2·PP2", "qwen3 on one rank", marks=pytest.mark.slow),
        pytest.param(
            "qwen3 of one query group at TP4",
            "qwen3 of one query group on one rank",
            marks=pytest.mark.slow,  # test_megatron_losses has such a layout without adapters
        ),
    ],
)
def test_losses_do_not_depend_on_the_layout(wide: str, narrow: str, runs: Runs) -> None:
    (_, layout, _), (_, alone, _) = runs(wide), runs(narrow)
    assert layout.losses == pytest.approx(alone.losses, abs=EPSILON)
    assert alone.losses[-1] < alone.losses[0] - 0.1


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "qwen3 at TP2",
        pytest.param("qwen3 at TP2·PP2", marks=pytest.mark.slow),
        pytest.param("qwen3 of one query group at TP4", marks=pytest.mark.slow),
        pytest.param("qwen2 at TP2", marks=pytest.mark.slow),
        pytest.param("qwen3_moe at EP2", marks=pytest.mark.slow),
    ],
)
def test_peft_computes_what_megatron_did(name: str, runs: Runs, tmp_path: Path) -> None:
    run, seen, trained = runs(name)
    reshard.convert(run.output, tmp_path / "final", base=run.model)
    assert megatron.ENGINE.check(run, trained, tmp_path / "final") == []
    # One step more says what Megatron's loss is with the adapters that were saved.
    world_size = CASES[name][1]
    further = replace(run, resume=True, options={**run.options, "train_iters": 5})
    last = train(further, world_size)[0].losses[-1]
    base = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "final")
    with torch.no_grad():
        assert float(mean_loss(adapted, model=run.model)) == pytest.approx(last, abs=EPSILON)
    assert last < seen.losses[0] - 0.1


@pytest.mark.thorough
def test_only_adapters_are_trained_and_saved(runs: Runs) -> None:
    run, seen, trained = runs("qwen3 at TP2")
    names = reshard.open(run.output).tensors
    assert names
    assert all(".adapter.linear_" in name for name in names)
    assert all(".adapter.linear_" in name for name in trained.digests)
    assert any("of which" in note for note in seen.notes)


@pytest.mark.thorough
def test_the_merged_model_computes_what_megatron_did(runs: Runs, tmp_path: Path) -> None:
    run, _, _ = runs("qwen3 on one rank")
    reshard.convert(run.output, tmp_path / "final", base=run.model)
    reshard.convert(run.output, tmp_path / "merged", base=run.model, merge=True)
    base = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "final")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        expected = float(mean_loss(adapted, model=run.model))
        assert float(mean_loss(merged, model=run.model)) == pytest.approx(expected, abs=1e-5)
    shapes = {tensor.ndim for tensor in load_file(tmp_path / "final" / "adapter_model.safetensors").values()}
    assert shapes == {2}


@pytest.mark.slow
def test_recomputed_activations_do_not_change_losses(runs: Runs, tmp_path: Path) -> None:
    run, seen, _ = runs("qwen3 on one rank")
    options = {**run.options, "recompute_granularity": "full"}
    again, _ = train(replace(run, output=tmp_path / "out", options=options))
    assert again.losses == pytest.approx(seen.losses, abs=EPSILON)


def test_a_rank_that_tensor_parallelism_does_not_divide_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    run = run_of(
        tiny("qwen3"), write_chats(tmp_path), tmp_path / "out", Layout(tp=2), **{**LORA, "lora_r": 3}
    )
    with pytest.raises(RankError, match=r"--lora_r 4"):
        train(run, 2)
