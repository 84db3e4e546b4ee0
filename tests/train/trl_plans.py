"""TRL runs on every plan, as the tests train, resume and compare them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reshard.algebra.layout import Layout
from reshard.training.methods import generates, is_rewarded
from reshard.training.run import Run
from tests.train.trl_runs import STEPS, Ran, train

PLANS = {"one": 1, "ddp": 2, "fsdp2": 2, "tp": 2, "tp+fsdp2": 4, "zero2": 2, "zero3": 2}
ENVIRONMENTS = {"zero2": "deepspeed", "zero3": "deepspeed"}
KINDS = {"one": "ddp", "tp+fsdp2": "tp"}
FOUR_DIGITS = 1e-4
EVALUATED = {"eval_steps": 2, "eval_on_start": True, "per_device_eval_batch_size": 2}
"""Options of all SFT runs, and of those with an evaluation."""
BESIDE = {
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "run.json",
    "trainer_state.json",
}
"""Files next to the weights in each checkpoint."""

Trainer = Callable[..., Ran]


def run_of(
    plan: str,
    method: str,
    model: Path,
    data: Path,
    output: Path,
    lora: bool,
    ep: int,
    options: dict[str, Any],
) -> Run:
    ranks = PLANS[plan]
    per_device = 8 // ranks if plan.startswith("tp") else 4 // ranks
    generated = {"max_completion_length": 8} if generates(method) else {}
    generated |= {"num_generations": 2} if is_rewarded(method) else {}
    evaluated = EVALUATED if method == "sft" and plan != "tp+fsdp2" else {}
    return Run(
        method,
        model,
        data,
        output,
        lora=lora,
        parallel=KINDS.get(plan, plan),
        layout=Layout(tp=2 if plan.startswith("tp") else 1, ep=ep),
        reward=("rewards:variety",) if is_rewarded(method) else (),
        options={**STEPS, "per_device_train_batch_size": per_device, **generated, **evaluated, **options},
    )


def resumed(ran: Ran, tmp_path: Path, ranks: int = 0) -> Ran:
    """The same run, killed after its first checkpoint while it wrote the second, and resumed."""
    output = tmp_path / "resumed"
    shutil.copytree(ran.run.output / "checkpoint-2", output / "checkpoint-2")
    (output / "checkpoint-4").mkdir()
    (output / "checkpoint-4/model.safetensors").write_bytes(b"half a fi")
    kind = ran.run.parallel
    run = replace(ran.run, output=output, resume=True)
    return train(run, ranks or PLANS[kind], environment=ENVIRONMENTS.get(kind))


def same_as(ran: Ran, other: Ran) -> None:
    assert ran.losses == pytest.approx(other.losses, abs=FOUR_DIGITS)
    norms = [[row["grad_norm"] for row in each.rows] for each in (ran, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert ran.evaluations() == pytest.approx(other.evaluations(), abs=FOUR_DIGITS)
