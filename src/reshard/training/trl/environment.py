"""accelerate's environment variables about the plan: `accelerate launch` and shells set them, and they silently win."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from reshard.base.arguments import truth
from reshard.base.errors import Problem, ReshardError
from reshard.training.run import Run

SIZES = {"TP_SIZE": "tp", "CP_SIZE": "cp", "SP_SIZE": "sp", "DP_SHARD_SIZE": "dp_shard"}
_CURE = "unset it, or let `accelerate launch` take a config that says the same as the flags of reshard"


def check(run: Run, options: Mapping[str, Any], variables: Mapping[str, str] = os.environ) -> None:
    """Refuse variables that contradict the plan, all at once. Raises ReshardError."""
    problems = [*_switches(run, variables), *_details(run, variables), *_precision(options, variables)]
    if problems:
        raise ReshardError(problems)


def _problem(name: str, variables: Mapping[str, str], asked: str) -> Problem:
    return Problem(
        "environment-contradicts-plan",
        "an environment variable contradicts the plan",
        rule="accelerate's variables override arguments",
        expected=asked,
        found=f"{name}={variables[name]}",
        remedy=_CURE,
    )


def _switches(run: Run, variables: Mapping[str, str]) -> Iterator[Problem]:
    kind = run.parallel
    allowed = {
        "ACCELERATE_USE_FSDP": kind == "fsdp2",
        "ACCELERATE_USE_DEEPSPEED": kind in ("zero2", "zero3"),
        "ACCELERATE_USE_MEGATRON_LM": False,
    }
    for name, fits in allowed.items():
        if truth(variables.get(name)) and not fits:
            yield _problem(name, variables, f"--parallel {kind}")


def _details(run: Run, variables: Mapping[str, str]) -> Iterator[Problem]:
    kind = run.parallel
    if kind == "fsdp2" and variables.get("FSDP_VERSION", "2") != "2":
        yield _problem("FSDP_VERSION", variables, "--parallel fsdp2")
    stage = variables.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    if kind.startswith("zero") and stage not in (None, kind[-1]):
        yield _problem("ACCELERATE_DEEPSPEED_ZERO_STAGE", variables, f"--parallel {kind}")
    for suffix, name in SIZES.items():
        variable = f"PARALLELISM_CONFIG_{suffix}"
        if variables.get(variable, "1") not in ("1", str(getattr(run.layout, name, 1))):
            yield _problem(variable, variables, f"{name} {getattr(run.layout, name, 1)}")


def _precision(options: Mapping[str, Any], variables: Mapping[str, str]) -> Iterator[Problem]:
    asked = "bf16" if options["bf16"] else "fp16" if options["fp16"] else "no"
    said = variables.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if said not in ("no", asked):
        yield _problem("ACCELERATE_MIXED_PRECISION", variables, f"mixed precision: {asked}")
    if truth(variables.get("ACCELERATE_USE_CPU")) and not options["use_cpu"]:
        yield _problem("ACCELERATE_USE_CPU", variables, "the GPU; --use_cpu to train without one")
