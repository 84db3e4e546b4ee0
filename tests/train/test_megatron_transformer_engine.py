"""TransformerEngine's layers, on its stand-in: the same losses from packed sequences, and the same conversion back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import reshard
from reshard.algebra.layout import Layout
from reshard.training import megatron
from reshard.training.run import Run
from tests.train.megatron import EPSILON, Seen, assert_close, reference, run_of, train, write_chats

Tiny = Callable[..., Path]
TE: dict[str, Any] = {"transformer_impl": "transformer_engine"}
LORA: dict[str, Any] = {"lora": True, "lora_r": 4}
CASES = [
    ("qwen3", 2, Layout(tp=2), {}),
    pytest.param("qwen3", 2, Layout(pp=2), {"micro_batch_size": 2}, marks=pytest.mark.slow),
    pytest.param("qwen3", 1, Layout(), {"pack": False, "global_batch_size": 16}, marks=pytest.mark.slow),
    pytest.param("qwen3_moe", 2, Layout(ep=2), {}, marks=pytest.mark.slow),
    pytest.param("deepseek_v2", 2, Layout(tp=2), {}, marks=pytest.mark.slow),
]


def _checked(run: Run, transformer_engine: Executor, world_size: int, final: Path) -> Seen:
    """The reports of rank 0 in a run whose final folder has the trained weights."""
    seen: Seen
    seen, trained = transformer_engine.submit(train, run, world_size).result(timeout=300)
    reshard.convert(run.output, final, base=run.model)
    assert megatron.ENGINE.check(run, trained, final) == []
    return seen


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "world_size", "layout", "options"), CASES)
def test_losses_are_those_of_transformers(
    model: str,
    world_size: int,
    layout: Layout,
    options: dict[str, Any],
    tiny: Tiny,
    tmp_path: Path,
    transformer_engine: Executor,
) -> None:
    run = run_of(tiny(model), write_chats(tmp_path), tmp_path / "out", layout, **TE, **options)
    assert_close(_checked(run, transformer_engine, world_size, tmp_path / "final"), reference(run.model))


@pytest.mark.slow
def test_ranks_that_share_a_query_group_have_the_same_losses(
    tiny: Tiny, tmp_path: Path, transformer_engine: Executor
) -> None:
    model = tiny("qwen3", num_key_value_heads=2)
    run = run_of(model, write_chats(tmp_path), tmp_path / "out", Layout(tp=4), **TE)
    assert_close(_checked(run, transformer_engine, 4, tmp_path / "final"), reference(model))


@pytest.mark.slow
def test_adapters_see_what_the_fused_norm_gives(
    tiny: Tiny, tmp_path: Path, transformer_engine: Executor
) -> None:
    data = write_chats(tmp_path)
    local, _ = train(run_of(tiny("qwen3"), data, tmp_path / "local", **LORA))
    run = run_of(tiny("qwen3"), data, tmp_path / "te", Layout(tp=2), **TE, **LORA)
    seen, trained = transformer_engine.submit(train, run, 2).result(timeout=300)
    assert seen.losses == pytest.approx(local.losses, abs=EPSILON)
    reshard.convert(run.output, tmp_path / "final", base=run.model)
    assert megatron.ENGINE.check(run, trained, tmp_path / "final") == []
