"""Real runs of TRL whose loss is NaN: they stop, name the step and its records, and keep the last good checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reshard.base.errors import ReshardError
from reshard.training.divergence import Divergence
from reshard.training.run import Run
from reshard.training.show.metrics import begun
from tests.train.conftest import spoil
from tests.train.trl_plans import run_of
from tests.train.trl_runs import train

Exploding = Callable[..., Run]


@pytest.fixture
def exploding(tiny: Callable[..., Path], data: dict[str, Path], tmp_path: Path) -> Exploding:
    """A run whose first step is so large that the loss of the second is NaN."""
    told = {"learning_rate": 1e30, "lr_scheduler_type": "constant", "save_steps": 1, "save_total_limit": 1}

    def get(**options: Any) -> Run:
        run = run_of("one", "sft", tiny(), data["sft"], tmp_path, False, 1, {**told, **options})
        return replace(run, eval_data=data["sft-eval"])

    return get


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loss_that_is_nan_stops_the_run_and_keeps_the_last_good_checkpoint(
    ranks: int, exploding: Exploding, tmp_path: Path
) -> None:
    bad = train(exploding(per_device_train_batch_size=4 // ranks, logging_steps=4), ranks)
    assert bad.failed and not (tmp_path / "trained.json").exists()
    assert "training diverged" in bad.log and "step 2: gradient norm nan, learning rate 1e+30" in bad.log
    assert "rank 0: loss nan, records 'user What is" in bad.log
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


@pytest.mark.parametrize("rate", [1e30, 1e39])
def test_a_run_has_failed_after_a_step_that_it_did_not_log(
    rate: float, exploding: Exploding, tmp_path: Path
) -> None:
    """It ends with exit status 1, as if the step had been logged."""
    bad = train(exploding(learning_rate=rate, logging_steps=10, save_steps=2 if rate < 1e31 else 1), 1)
    assert bad.failed and not any(row["step"] == 1 for row in bad.rows)
    assert begun(tmp_path)


def test_a_run_that_is_allowed_more_nan_steps_ends_without_saving_them(
    exploding: Exploding, tmp_path: Path
) -> None:
    bad = train(replace(exploding(), nan_steps=9), 1)
    assert bad.failed and not (tmp_path / "trained.json").exists()
    assert [row["loss"] for row in bad.rows[1:]] == ["nan"] * 3
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


def test_weights_that_overflow_are_not_saved(exploding: Exploding, tmp_path: Path) -> None:
    bad = train(exploding(learning_rate=1e39), 1)
    assert bad.failed and not list(tmp_path.glob("checkpoint-*"))
    assert "weights contain NaN or Inf and are not saved" in bad.log


@pytest.mark.parametrize(
    ("name", "place", "lora"),
    [
        ("model.layers.1.mlp.up_proj.weight", (3, 5), False),
        ("model.layers.1.mlp.up_proj.weight", (3, 5), True),
        ("model.embed_tokens.weight", (-1, 0), False),  # of no token: the loss is finite
    ],
)
def test_weights_of_the_base_that_are_nan_are_not_called_divergence(
    name: str, place: tuple[int, int], lora: bool, folder: Path, data: dict[str, Path], tmp_path: Path
) -> None:
    spoil(folder, name, place)
    run = run_of("one", "sft", folder, data["sft"], tmp_path / "out", lora, 1, {})
    bad = train(replace(run, eval_data=data["sft-eval"]), 1)
    assert bad.failed and "weights of the base model are NaN or infinite" in bad.log, bad.log
    assert f"found: {name}\n" in bad.log and "training diverged" not in bad.log
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_a_base_is_read_once_however_many_steps_are_not_finite(folder: Path) -> None:
    counted = Divergence(9, folder)
    for _ in range(2):
        counted.add(finite=False)
        counted.check_base()
    spoil(folder, "model.norm.weight", (0,))
    counted.check_base()
    with pytest.raises(ReshardError, match=r"model\.norm\.weight"):
        fresh = Divergence(9, folder)
        fresh.check_base()
        fresh.add(finite=False)
        fresh.check_base()
