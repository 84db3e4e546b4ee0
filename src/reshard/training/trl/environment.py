"""accelerate's environment variables about the plan: `accelerate launch` and shells set them, and they silently win."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from reshard.base.arguments import truth
from reshard.base.errors import Problem
from reshard.training.run import Run

SIZES = {"TP_SIZE": "tp", "CP_SIZE": "cp", "SP_SIZE": "sp", "DP_SHARD_SIZE": "dp_shard"}


def contradictions(
    run: Run, options: Mapping[str, Any], variables: Mapping[str, str] = os.environ
) -> Iterator[Problem]:
    """A problem for each variable that contradicts the plan."""
    for name, asked in _planned(run, options, variables):
        yield Problem(
            "environment-contradicts-plan",
            "an environment variable contradicts the plan",
            rule="accelerate's variables override arguments",
            expected=asked,
            found=f"{name}={variables[name]}",
            remedy="unset it, or let `accelerate launch` take a config that says the same as the flags of reshard",
        )


def _planned(run: Run, options: Mapping[str, Any], variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Variables with another value than the plan has, and the plan in words."""
    kind, plan = run.parallel, f"--parallel {run.parallel}"
    precision = "bf16" if options["bf16"] else "fp16" if options["fp16"] else "no"
    switches = {
        "ACCELERATE_USE_FSDP": (kind == "fsdp2", plan),
        "ACCELERATE_USE_DEEPSPEED": (kind.startswith("zero"), plan),
        "ACCELERATE_USE_MEGATRON_LM": (False, plan),
        "ACCELERATE_USE_CPU": (options["use_cpu"], "the GPU; --use_cpu to train without one"),
    }
    values: dict[str, tuple[tuple[str, ...], str]] = {
        "ACCELERATE_MIXED_PRECISION": (("no", precision), f"mixed precision: {precision}")
    }
    if kind == "fsdp2":
        values["FSDP_VERSION"] = ("2",), plan
    if kind.startswith("zero"):
        values["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = (kind[-1],), plan
    for suffix, name in SIZES.items():
        size = str(getattr(run.layout, name, 1))
        values[f"PARALLELISM_CONFIG_{suffix}"] = ("1", size), f"{name} {size}"
    wrong = {name: asked for name, (on, asked) in switches.items() if truth(variables.get(name)) and not on}
    wrong |= {
        name: asked
        for name, (fitting, asked) in values.items()
        if variables.get(name, fitting[0]).lower() not in fitting
    }
    yield from wrong.items()
