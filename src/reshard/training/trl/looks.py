"""Checks before the start for reasons why TRL cannot run: plan, machine, packed samples, template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from reshard.base.errors import Problem, ReshardError
from reshard.checks.environment import Environment
from reshard.checks.machine import facts_of, old_gpus
from reshard.diagnosis.finding import Text
from reshard.folders.companions import CONFIG, read_object
from reshard.training.findings import in_short, of_fact
from reshard.training.run import Run
from reshard.training.trl import environment as variables
from reshard.training.trl import vllm
from reshard.training.trl.arithmetic import alien_parallelism, plan_instead
from reshard.training.trl.config_fields import options_of, refused_by_packages
from reshard.training.trl.methods import WAYS
from reshard.transfer.sources import Sources

RULES = ("env-device-map-tp", "env-accelerate-fsdp2-lora", "env-trl-transformers")
"""Rules of the environment that can break a run. Rules about launches cannot: reshard sets these variables itself."""


def asked(run: Run) -> Iterator[Problem]:
    """Problems of layouts, plans and models that TRL does not support, whatever is installed."""
    way = WAYS[run.method]
    if run.parallel not in way.plans:
        yield Problem(
            "trl-method-plan-unsupported",
            f"{way.name} does not run under this plan",
            rule=way.why,
            expected=f"--parallel {', '.join(way.plans)}",
            found=f"--parallel {run.parallel}",
            remedy=f"{plan_instead(run, way.plans[0])}; LoRA and gradient checkpointing save memory",
        )
    alien = list(alien_parallelism(run))
    yield from alien
    if not alien and (run.layout.tp > 1) != (run.parallel == "tp"):
        yield Problem(
            "parallel-and-tp-disagree",
            "--parallel and --tp disagree",
            found=f"--parallel {run.parallel} with --tp {run.layout.tp}",
            expected="--parallel tp --tp N",
            remedy="pass both, or neither",
        )
    yield from _first_qwen(run)


def machine(run: Run, options: Mapping[str, Any], environment: Environment) -> Iterator[Problem]:
    """Problems of the environment that affect this run, including packed samples that see each other."""
    yield from (of_fact(fact) for fact in facts_of(environment) if fact.code in RULES)
    yield from variables.contradictions(run, options, environment.variables)
    yield from _packed(options)
    if environment.gpus and not options.get("use_cpu"):
        flash = str(options.get("attn_implementation")).startswith("flash")
        if options.get("bf16") or flash:
            yield from (of_fact(fact, "error") for fact in old_gpus(environment))


_OF_QWEN_1 = (
    *(
        "'transformers==4.53.3'",
        "'trl==0.19.1'",
        "'peft==0.15.2'",
        "'accelerate==1.9.0'",
        "'datasets==3.6.0'",
    ),
    *("tiktoken", "einops", "transformers_stream_generator"),
)
"""Packages with which Qwen-1 was trained: LoRA of the class in Qwen/Qwen-7B, on two ranks of torch 2.6 and 2.13."""


def _first_qwen(run: Run) -> Iterator[Problem]:
    """A problem for Qwen-1: its code imports a package that needs `DisjunctiveConstraint` of transformers 4."""
    with suppress(ReshardError, OSError):  # reported for the model's folder
        if read_object(run.model / CONFIG, Sources()).get("model_type") == "qwen":
            yield _qwen_1(run)


def _qwen_1(run: Run) -> Problem:
    """The problem, with the command for versions that train it."""
    return Problem(
        "model-needs-transformers-4",
        "the code of Qwen-1 does not run with transformers 5",
        file=str(run.model / CONFIG),
        rule="transformers has no class for it, and its own code needs what transformers 5 has removed",
        found="model_type: qwen",
        expected="Qwen1.5 or later (model_type qwen2, qwen3)",
        remedy="train it by your own script, with ddp_find_unused_parameters=False, in another environment: python -m "
        f"venv old && old/bin/pip install torch {' '.join(_OF_QWEN_1)} && reshard guard -- old/bin/torchrun "
        f"--nproc-per-node {run.ranks.nproc or 'gpu'} script.py",
    )


def loaded(run: Run, options: Mapping[str, Any], environment: Environment) -> Iterator[Problem]:
    """Problems that the installed packages know: names and values of options, vLLM."""
    yield from refused_by_packages(run, options)
    yield from vllm.problems(run, options, environment)


def model(run: Run) -> Iterator[Problem]:
    """Problems of the model's own code that would fail at the first step. Untrusted code is not run."""
    from reshard.diagnosis.checkpoints import remote_code  # with all that diagnoses a checkpoint

    options = options_of(run)
    if options["trust_remote_code"] and options["gradient_checkpointing"]:
        for finding in remote_code(run.model):
            if finding.code == "checkpoint-old-gradient-checkpointing":
                problem = in_short(finding, "error")
                cure = f"{problem.remedy} Or pass --gradient_checkpointing false."
                yield replace(problem, remedy=Text.same(cure))


def _packed(options: Mapping[str, Any]) -> Iterator[Problem]:
    """A problem for packed samples that would attend to each other. Other strategies separate them by positions."""
    if options.get("packing") and options.get("packing_strategy") == "wrapped":
        yield Problem(
            "packed-samples-see-each-other",
            "samples that share a sequence see each other",
            rule="the strategy `wrapped` cuts a stream of tokens into sequences and ignores sample boundaries",
            found="--packing_strategy wrapped",
            remedy="leave it out: bfd keeps samples apart; for long texts use bfd_split",
        )
