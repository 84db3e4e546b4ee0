"""Plans for machines that do not exist here: which fit, in which order, the command, and the minimum if none fits."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.models import make
from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.training import memory
from reshard.training.engine import StepCounts
from reshard.training.engine_registry import engine_of
from reshard.training.memory.activations import LayerWidths
from reshard.training.planning import gpu_models
from reshard.training.planning.gpu_models import GPU_MODELS, PlannedMachine, card_of, machine_of, planned_for
from reshard.training.planning.plans import PlannedRun, plans_of
from reshard.training.planning.step_time import StepWork, Traffic, flops_of_token
from reshard.training.preflight import preflight
from reshard.training.run import Run
from tests.commandline import reshard
from tests.train.test_memory import QWEN3_8B, run_on

H100 = card_of("H100")


@pytest.fixture(scope="module")
def qwen3_8b(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path]) -> Path:
    """Qwen3-8B with its full size and no stored data, and a tokenizer."""
    folder = make(tmp_path_factory.mktemp("sparse") / "qwen3-8b", QWEN3_8B, sparse=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(tiny("qwen3") / name, folder / name)
    return folder


@pytest.mark.parametrize(
    ("typed", "memory", "expected"),
    [
        ("8", "80GB", "8 × GPU of 80 GiB"),
        ("H100:8", None, "8 × H100"),
        ("a100:4", None, "4 × A100-80GB"),
        ("NVIDIA A100-SXM4-40GB:4", None, "4 × A100-40GB"),
        ("NVIDIA H100 80GB HBM3:8", None, "8 × H100"),
        ("NVIDIA GeForce RTX 4090:2", None, "2 × 4090"),
        ("NVIDIA RTX 6000 Ada Generation:2", None, "2 × 6000-Ada"),
        ("4090", None, "1 × 4090"),
        ("L40S", None, "1 × L40S"),
    ],
)
def test_gpus_are_named_as_people_and_drivers_do(typed: str, memory: str | None, expected: str) -> None:
    assert str(machine_of(typed, memory, 1)) == expected
    assert str(machine_of(typed, memory, 2)) == f"2 nodes with {expected}"


@pytest.mark.parametrize("card", GPU_MODELS, ids=[card.name for card in GPU_MODELS])
def test_every_card_is_found_by_its_name_and_by_no_other(card: gpu_models.GpuModel) -> None:
    assert card_of(card.name) is card


@pytest.mark.parametrize(
    ("typed", "memory", "code"),
    [
        ("8", None, "planned-gpu-memory-missing"),
        ("0", "80GB", "planned-gpus-unclear"),
        ("H100:many", None, "planned-gpus-unclear"),
        ("H1000:8", None, "planned-gpu-unknown"),
        ("8", "lots", "planned-gpu-memory-unclear"),
        ("8", "0", "planned-gpu-memory-unclear"),
    ],
)
def test_gpus_that_are_not_understood_are_refused(typed: str, memory: str | None, code: str) -> None:
    with pytest.raises(ReshardError) as caught:
        machine_of(typed, memory, 1)
    assert [problem.code for problem in caught.value.problems] == [code]


def test_a_run_is_asked_about_as_if_it_were_there(qwen3_8b: Path) -> None:
    from reshard.training.trl.config_fields import options_of

    run = run_on(qwen3_8b)
    here = options_of(run)
    with planned_for(machine_of("H100:8", None, 1).environment()):
        there = options_of(run)
    with planned_for(machine_of("V100:8", None, 1).environment()):
        old = options_of(run)
    assert (here["bf16"], here["use_cpu"]) == (False, True)
    assert (there["bf16"], there["fp16"], there["use_cpu"]) == (True, False, False)
    assert (old["bf16"], old["fp16"]) == (False, True)


def asked(run: Run) -> PlannedRun:
    return PlannedRun(run, 10_000, 1024, 1024)


def test_what_fits_is_sorted_by_speed_and_takes_what_it_says(qwen3_8b: Path) -> None:
    run = run_on(qwen3_8b)
    plans = plans_of(asked(run), PlannedMachine(H100, 8)).fitting
    speeds = [plan.tokens for plan in plans]
    assert speeds == sorted(speeds, reverse=True) and len(plans) > 3
    assert {plan.run.parallel for plan in plans} >= {"fsdp2", "tp"}
    assert "ddp" not in {plan.run.parallel for plan in plans}, (
        "8 billion float32 weights, gradients and moments"
    )
    for plan in plans:
        engine = engine_of(plan.run)
        with planned_for(PlannedMachine(H100, 8).environment()):
            batches = replace(engine.batches(plan.run, 8, 10_000), length=1024)
            taken = memory.estimate(plan.run, batches, engine.precision(plan.run), 8)
        assert plan.memory == taken and memory.fits(taken, H100.bytes)


@pytest.mark.parametrize("given", [{"lora": True}, {"parallel": "fsdp2"}])
def test_the_run_as_it_was_asked_for_is_one_of_the_plans(given: dict[str, Any], qwen3_8b: Path) -> None:
    run = replace(run_on(qwen3_8b), **given)
    found = {plan.flags: plan.run for plan in plans_of(asked(run), PlannedMachine(H100, 8)).fitting}
    assert found[()] == run


def test_ways_to_split_a_model_that_its_heads_do_not_allow_are_left_out(tiny: Callable[..., Path]) -> None:
    plans = plans_of(asked(run_on(tiny("qwen3"))), PlannedMachine(H100, 8)).fitting
    assert {plan.run.layout.tp for plan in plans} == {1, 2, 4}


def test_tensor_parallelism_is_slower_where_it_leaves_the_node(qwen3_8b: Path) -> None:
    run = replace(run_on(qwen3_8b), parallel="tp", layout=Layout(tp=8))
    engine = engine_of(run)
    with planned_for(PlannedMachine(H100, 8).environment()):
        batches = engine.batches(run, 8, 10_000)
        work = engine.estimates.work(run, batches, engine.precision(run), 8)
    assert work.seconds(PlannedMachine(H100, 4, 2)) > 1.5 * work.seconds(PlannedMachine(H100, 8))


@pytest.mark.thorough
def test_the_layouts_of_megatron_are_compared(qwen3_8b: Path) -> None:
    run = run_on(qwen3_8b, engine="megatron", options={"train_iters": 10})
    plans = plans_of(asked(run), PlannedMachine(H100, 8)).fitting
    layouts = {(plan.run.layout.tp, plan.run.layout.pp) for plan in plans}
    assert {(2, 1), (1, 2), (2, 2)} <= layouts
    pipelines = [plan.tokens for plan in plans if plan.run.layout.pp == 8]
    assert max(pipelines) < plans[0].tokens


def test_where_nothing_fits_the_smallest_that_does_is_named(qwen3_8b: Path) -> None:
    found = plans_of(asked(run_on(qwen3_8b)), PlannedMachine(card_of("4090"), 1))
    assert found.fitting == () and found.problem is not None
    assert "× 4090" in found.problem.remedy or "nodes with" in found.problem.remedy
    lora = plans_of(asked(run_on(qwen3_8b)), PlannedMachine(card_of("A6000"), 1)).problem
    assert lora is not None and lora.remedy.startswith("the smallest that fits: --lora on the same GPUs; or ")
    named = lora.remedy.split("; or ")[1]
    assert named.endswith("× A6000")


def test_operations_of_a_token_are_two_for_each_weight() -> None:
    widths = LayerWidths.of(QWEN3_8B)
    weights = 8_190_735_360 - 151_936 * 4096  # all but the embedding, which is looked up
    assert flops_of_token(widths, 0) == pytest.approx(2 * weights, rel=1e-3)


def test_a_step_waits_for_what_is_not_hidden() -> None:
    machine = PlannedMachine(H100, 8)
    second = 989e12 / 2
    assert StepWork(second).seconds(machine) == pytest.approx(1)
    assert StepWork(second, hidden=(Traffic(450e9, 8),)).seconds(machine) == pytest.approx(1)
    assert StepWork(second, waited=(Traffic(450e9 * 8 / 7, 8),)).seconds(machine) == pytest.approx(2)
    assert StepWork(second, idle=0.5).seconds(machine) == pytest.approx(2)
    assert Traffic(1e9, 1).seconds(machine) == 0


def words(qwen3_8b: Path, data: dict[str, Path], output: Path, *more: str) -> list[Any]:
    return ["train", "sft", "--model", qwen3_8b, "--data", data["sft"], "-o", output, "--dry-run", *more]


def test_the_command_of_each_plan_is_what_was_typed_and_what_the_plan_adds(
    qwen3_8b: Path, data: dict[str, Path], tmp_path: Path
) -> None:
    typed = words(qwen3_8b, data, tmp_path / "out", "--gpus", "8", "--gpu-memory=80GB", "--nodes", "2")
    result = reshard(*typed, "--learning_rate", "1e-5", "--json")
    assert result.code == 0, result.out + result.err
    found = result.json["preflight"]["plans"]
    assert found["machine"] == "2 nodes with 8 × GPU of 80 GiB" and "A100" in found["speed"]
    best = shlex.split(found["plans"][0]["command"])
    assert best[:3] == ["reshard", "train", "sft"] and "--dry-run" not in best and "--gpus" not in best
    assert best[best.index("--nnodes") + 1] == "2" and best[best.index("--nproc") + 1] == "8"
    assert "80GB" not in best and "--learning_rate=1e-5" in best and "--rendezvous" in best
    assert not (tmp_path / "out").exists()


def test_a_table_is_printed_and_what_fits_nowhere_is_refused(
    qwen3_8b: Path, data: dict[str, Path], tmp_path: Path
) -> None:
    result = reshard(*words(qwen3_8b, data, tmp_path / "out", "--gpus", "H100:8"))
    assert result.code == 0, result.err
    assert "plans that fit on 8 × H100" in result.out and "FSDP2" in result.out
    assert "1 reshard train sft" in result.out and "estimate" in result.out
    none = reshard(*words(qwen3_8b, data, tmp_path / "out", "--gpus", "T4:1"))
    assert (
        none.code == 2 and "nothing fits on these GPUs" in none.err and "the smallest that fits" in none.err
    )


@pytest.mark.parametrize(
    "flags",
    [
        ("--gpus", "H100:8"),
        ("--dry-run", "--gpu-memory", "80GB"),
        ("--dry-run", "--gpus", "H100:8", "--slurm", "cluster=local"),
    ],
)
def test_half_of_a_question_is_refused(flags: tuple[str, ...], tmp_path: Path) -> None:
    result = reshard("train", "sft", "--model", tmp_path, "--data", tmp_path, "-o", tmp_path / "out", *flags)
    assert result.code == 2 and "error:" in result.err and "Traceback" not in result.err


def test_the_machine_at_hand_does_not_matter(qwen3_8b: Path, data: dict[str, Path], tmp_path: Path) -> None:
    run = Run("sft", qwen3_8b, data["sft"], tmp_path / "out")
    found = preflight(run, machine=machine_of("H100:8", None, 1))
    assert found.problems == [] and found.devices.startswith("8 × H100")
    assert json.loads(json.dumps(found.as_dict()))["plans"]["plans"]
    assert isinstance(found.batches, StepCounts) and found.batches.replicas == 8
