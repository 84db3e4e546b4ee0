"""Memory: plans for machines that do not exist here, and models that cannot be estimated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.models import make
from reshard.base.errors import GIB, ReshardError
from reshard.checks.environment import Environment, Gpu
from reshard.folders.companions import read_object
from reshard.training import memory
from reshard.training.engine import StateBytes, StepCounts
from reshard.training.engine_registry import engine_of
from reshard.training.memory import MemoryEstimate
from reshard.training.memory.activations import LayerWidths
from reshard.training.run import Run
from reshard.transfer.source_files import Sources
from tests.train.test_memory import QWEN3_8B, SMALL, run_on


@pytest.fixture(scope="module")
def qwen3_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-8B with its full size, and no stored data."""
    return make(tmp_path_factory.mktemp("sparse") / "qwen3-8b", QWEN3_8B, sparse=True)


def estimated(run: Run, world_size: int) -> MemoryEstimate:
    engine = engine_of(run)
    return memory.estimate(run, engine.batches(run, world_size, 10_000), engine.precision(run), world_size)


HALF = {"bf16": True}


@pytest.mark.parametrize(
    ("gpus", "size", "given", "proposed"),
    [
        (8, 80, {}, ("--parallel fsdp2",)),
        (8, 80, {"parallel": "fsdp2"}, None),
        (8, 80, {"lora": True}, None),
        (4, 20, {"lora": True}, ("--parallel fsdp2",)),
        (1, 20, {"lora": True}, ("--per_device_train_batch_size 1", "--gradient_accumulation_steps 8")),
        (1, 16, {"lora": True}, "nothing"),
        (8, 80, {"method": "dpo"}, ("--parallel fsdp2",)),
        (2, 40, {}, "nothing"),
        (
            8,
            80,
            {"engine": "megatron"},
            ("--recompute_granularity full",),
        ),
        (4, 80, {"engine": "megatron"}, ("--tp 2", "--recompute_granularity selective")),
    ],
)
def test_plans_that_fit_are_found(
    gpus: int, size: int, given: dict[str, Any], proposed: tuple[str, ...] | str | None, qwen3_8b: Path
) -> None:
    steps = {"train_iters": 10} if given.get("engine") else {}
    lora = {"dtype": "bfloat16"} if given.get("lora") else {}
    run = run_on(qwen3_8b, **{**given, "options": {**HALF, **lora, **steps}})
    room = size * GIB
    assert memory.fits(estimated(run, gpus), room) is (proposed is None)
    if proposed is not None:
        found = memory.plan_that_fits(run, gpus, 10_000, room)
        assert (found.flags if found else "nothing") == proposed
        assert found is None or memory.fits(found.memory, room)


def test_attention_matrices_of_the_local_spec_are_what_fills_a_gpu_with_megatron(qwen3_8b: Path) -> None:
    run = run_on(qwen3_8b, engine="megatron", options={**HALF, "train_iters": 10})
    batches, precision = StepCounts(1, 2, 8, 10, 4096), engine_of(run).precision(run)
    alone = memory.estimate(run, batches, precision, 8)
    assert not memory.fits(alone, 80 * GIB)
    again = replace(run, options={**run.options, "recompute_granularity": "selective"})
    less = memory.estimate(again, batches, precision, 8)
    matrices = 36 * 32 * 4096 * 4096 * 6
    assert alone.step["activations"] - less.step["activations"] == pytest.approx(matrices, rel=0.05)


def test_a_reference_model_lies_beside_the_policy_unless_adapters_can_be_switched_off(qwen3_8b: Path) -> None:
    options = {**HALF, "dtype": "bfloat16"}
    full = estimated(run_on(qwen3_8b, method="dpo", options=options), 8)
    assert full.always["reference model"] == full.always["weights"]
    assert (
        "reference model"
        not in estimated(run_on(qwen3_8b, method="dpo", lora=True, options=options), 8).always
    )


def test_longer_sequences_take_more_and_recomputation_less(qwen3_8b: Path) -> None:
    run, precision = run_on(qwen3_8b, parallel="fsdp2", options=HALF), StateBytes(4, 4, 8)
    short, long = (
        memory.estimate(run, StepCounts(1, 1, 8, 1, length), precision, 8) for length in (1024, 4096)
    )
    assert long.step["activations"] == 4 * short.step["activations"]
    again = memory.estimate(run, StepCounts(1, 1, 8, 1, 4096), replace(precision, recomputation=True), 8)
    assert again.step["activations"] < long.step["activations"] / 8


def test_room_is_that_of_the_smallest_gpu_or_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    gpus = [Gpu("A100", 8.0, 80 * GIB), Gpu("A100", 8.0, 40 * GIB)]
    assert memory.available(Environment({}, gpus, None, {}), 2) == 40 * GIB
    free = int(psutil.virtual_memory().available)
    assert memory.available(Environment({}, [], None, {}), 4) == pytest.approx(free / 4, rel=0.2)


def test_sizes_of_a_family_that_is_not_declared_are_read_from_usual_names(tiny: Callable[..., Path]) -> None:
    config = read_object(tiny("qwen3") / "config.json", Sources())
    widths, plain = LayerWidths.of(config), LayerWidths.of({**config, "model_type": "unheard_of"})
    assert replace(widths, qk_norm=False, expert_ffn=0) == plain


def test_a_config_without_sizes_is_a_warning_and_a_text_model_is_found_inside() -> None:
    with pytest.raises(ReshardError) as caught:
        LayerWidths.of({"model_type": "qwen3", "hidden_size": 64})
    assert [problem.severity for problem in caught.value.problems] == ["warning"]
    assert LayerWidths.of({"model_type": "seen", "text_config": SMALL}) == LayerWidths.of(SMALL)
