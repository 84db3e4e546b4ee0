"""Preflight: whether the run fits on this machine, its GPUs, its disk and its packages."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.models import make
from reshard.algebra.layout import Layout
from reshard.base.missing_packages import install_command
from reshard.checks.environment import Environment
from reshard.training import preconditions
from reshard.training.engine_registry import engine_of
from reshard.training.findings_as_problems import lacking
from reshard.training.megatron import checks
from reshard.training.preflight import preflight
from reshard.training.preflight_report import Preflight
from reshard.training.run import Run, RunProcesses
from tests.train.preflights import NOWHERE, gpus, messages, the
from tests.train.test_memory import QWEN3_8B

AS_BF16 = {"options": {"bf16": True, "use_cpu": False}}
IN_STAGES = {"engine": "megatron", "layout": Layout(pp=3), "ranks": RunProcesses(nproc=3)}
OVER_THREE = {"engine": "megatron", "layout": Layout(tp=3), "ranks": RunProcesses(nproc=3)}


@pytest.mark.parametrize(
    ("given", "environment", "message", "remedy"),
    [
        (AS_BF16, gpus(2, capability=7.0), "does not support bfloat16", "--fp16 true"),
        (AS_BF16, gpus(1, gib=1), "does not fit into memory", "no plan that was tried"),
        (OVER_THREE, NOWHERE, "attention heads are not divisible by --tp 3", "choose --tp from"),
        (IN_STAGES, NOWHERE, "layers cannot be divided among the pipeline stages", "choose --pp from"),
    ],
)
def test_what_the_machine_cannot_do_is_refused_with_its_cure(
    given: dict[str, Any], environment: Environment, message: str, remedy: str, run: Run
) -> None:
    problem = the(message, preflight(replace(run, **given), environment=environment).problems)
    assert remedy in str(problem.remedy) and "--stages" not in str(problem)


def test_gpus_are_those_that_are_visible(run: Run) -> None:
    both = gpus(4, CUDA_VISIBLE_DEVICES="1,3")
    assert len(both.visible) == 2
    assert gpus(2, CUDA_VISIBLE_DEVICES="").visible == []
    assert gpus(2, CUDA_VISIBLE_DEVICES="-1").visible == []
    assert len(gpus(2, CUDA_VISIBLE_DEVICES="GPU-8f1c").visible) == 1


def test_a_torch_without_cuda_beside_gpus_is_a_warning(run: Run) -> None:
    there = replace(gpus(2), versions={"torch": "2.13.0+cpu"})
    assert "--use_cpu" in str(the("built without CUDA", preflight(run, environment=there).warnings).remedy)
    told = preflight(replace(run, options={"use_cpu": "true"}), environment=there)
    assert told.warnings == []


def test_a_disk_that_is_too_small_is_told_from_the_checkpoints_that_are_kept(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preconditions.shutil, "disk_usage", lambda _: SimpleNamespace(free=4 << 20))
    every_step = replace(run, options={"save_strategy": "steps", "save_steps": 1})
    problem = the("the disk is too small", preflight(every_step, environment=NOWHERE).problems)
    assert "--save_total_limit" in str(problem.remedy) and "--save_only_model" in str(problem.remedy)
    (resumed,) = preconditions.disk(replace(every_step, resume=True), 1 << 30)
    assert "--save_only_model" not in str(resumed.remedy)  # it is refused there
    few = replace(every_step, options={**every_step.options, "save_total_limit": 1})
    assert preflight(few, environment=NOWHERE).problems == []


def test_packages_that_are_missing_or_old_come_with_the_command(run: Run) -> None:
    there = dict.fromkeys(engine_of(run).requires(run), "99") | {"peft": "0.20"}
    del there["trl"]
    missing, old = sorted(
        lacking(engine_of(run).requires(run), there), key=lambda problem: str(problem.found), reverse=True
    )
    assert (missing.message, missing.expected) == ("not installed: trl", "trl>=1.16,<1.17")
    assert missing.remedy == install_command("trl")
    assert (old.message, old.found) == ("reshard does not train with this version of peft", "0.20")
    (new,) = lacking(engine_of(run).requires(run), there | {"trl": "1.17", "peft": "0.21"})
    assert (new.expected, new.remedy) == ("trl>=1.16,<1.17", "pip install 'trl>=1.16,<1.17'")
    zero = replace(run, parallel="zero3")
    assert [
        p.message for p in lacking(engine_of(zero).requires(zero), there | {"trl": "1.16", "peft": "0.21"})
    ] == ["not installed: deepspeed"]


def test_an_old_megatron_core_cannot_share_query_groups(tiny: Callable[..., Path], run: Run) -> None:
    groups = replace(run, model=tiny("qwen3", num_key_value_heads=2), engine="megatron")
    shared = replace(groups, layout=Layout(tp=4))
    old = {"megatron-core": "0.15.3"}
    (problem,) = checks.model(shared, old)
    assert (problem.message, problem.found) == (
        "reshard does not train with this version of megatron-core",
        "0.15.3",
    )
    assert problem.rule == "--tp 4 is larger than the 2 query groups"
    assert problem.remedy == "pip install --no-deps 'megatron-core>=0.16'"
    assert list(checks.model(shared)) == list(checks.model(replace(groups, layout=Layout(tp=2)), old)) == []


def test_processes_are_those_of_the_launcher_that_is_there(run: Run) -> None:
    started = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    found = preflight(run, environment=Environment({}, [], None, started))
    assert (found.world_size, found.command, found.problems) == (2, [], [])


@pytest.fixture(scope="module")
def qwen3_8b(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-8B, with a tokenizer and without a byte of weights on the disk."""
    model = make(tmp_path_factory.mktemp("sparse") / "qwen3-8b", QWEN3_8B, sparse=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tiny("qwen3") / name).is_file():
            shutil.copyfile(tiny("qwen3") / name, model / name)
    return model


def looked_at(run: Run, environment: Environment) -> tuple[Preflight, float]:
    before = time.process_time()
    return preflight(run, environment=environment), time.process_time() - before


def test_a_model_that_does_not_fit_is_refused_with_the_plan_that_does(
    qwen3_8b: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preconditions.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 50))
    options = {"bf16": "true", "use_cpu": "false", "max_length": 1024}
    ddp = replace(run, model=qwen3_8b, options=options, ranks=RunProcesses(nproc=8))
    found, seconds = looked_at(ddp, gpus(8))
    problem = the("does not fit into memory", found.problems)
    assert messages(found.problems) == [problem.message]
    assert "--parallel fsdp2" in str(problem.remedy) and "--lora" in str(problem.remedy)
    assert "optimizer 61.0 GiB" in str(problem.found) and "76.0 GiB" in str(problem.expected)
    assert seconds < 10
    fsdp2, _ = looked_at(replace(ddp, parallel="fsdp2"), gpus(8))
    assert fsdp2.problems == [] and fsdp2.room is not None and fsdp2.room.fits
    assert fsdp2.devices == "8 × H100 with 80 GiB"


def test_layers_that_do_not_divide_are_told_in_flags_that_there_are(run: Run) -> None:
    wrong = replace(run, engine="megatron", layout=Layout(pp=3), ranks=RunProcesses(nproc=3))
    problem = the(
        "cannot be divided among the pipeline stages", preflight(wrong, environment=NOWHERE).problems
    )
    assert "--stages" not in str(problem) and "add up" not in str(problem)
