"""Checks before the start for reasons why Megatron-Core cannot run: plan, machine, sizes of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError
from reshard.checks.environment import Environment
from reshard.checks.machine_checks import old_gpus
from reshard.checks.remedies import in_words_of
from reshard.folders import iterations
from reshard.formats import open_checkpoint
from reshard.formats.megatron.supported_layouts import SHARED_GROUPS, shares_groups
from reshard.guard.end.completeness import SAVED_FILE
from reshard.model.described_checkpoint import describe
from reshard.model.resolve import resolve
from reshard.training.findings_as_problems import lacking, of_violation
from reshard.training.megatron.options import read
from reshard.training.megatron.sharded_weights import layout_of
from reshard.training.run import Run


def asked(run: Run) -> Iterator[Problem]:
    """A problem if the requested parallelism is one of TRL's."""
    if run.parallel not in ("ddp", "tp"):
        yield Problem(
            "megatron-parallelism-unsupported",
            "the Megatron engine has no such parallelism",
            found=f"--parallel {run.parallel}",
            expected="--tp, --pp, --vpp, --ep and --cp; the rest of the ranks is data parallel",
            remedy="leave out --parallel, or use --engine trl",
        )


def machine(run: Run, options: Mapping[str, Any], environment: Environment) -> Iterator[Problem]:
    """Problems of GPUs that cannot compute with these options."""
    if not environment.gpus:
        return
    half = options.get("bf16") is not False and not options.get("fp16") and not options.get("fp32")
    if half or options.get("attention_backend") == "flash":
        yield from (of_violation(violation, "error") for violation in old_gpus(environment))


def model(run: Run, installed: Mapping[str, str] | None = None) -> Iterator[Problem]:
    """Problems if the model's sizes are not divisible by the ranks, or the installed megatron-core cannot train it."""
    try:
        model = resolve(describe(open_checkpoint(run.model))).declared
        cure = "correct config.json, or train it with --engine trl"
        yield from (replace(each, severity="error", remedy=cure) for each in model.warnings)
        options = read(run)
        layout = layout_of(run, options, model)
        if shares_groups(model, layout):
            rule = f"--tp {run.layout.tp} is larger than the {model.dims.groups} query groups"
            yield from lacking({"megatron-core": SHARED_GROUPS}, installed, rule)
        _known(run.model)
        if options.more:
            from reshard.training.megatron.rank_setup import try_configs  # which imports megatron-core

            try_configs(model.args, options, replace(layout, cp=run.layout.cp))
    except ReshardError as error:
        yield from (in_words_of("train", each) for each in error.problems)


def _known(folder: Path) -> None:
    """Raise ReshardError if transformers does not know the model, because the final folder has to load."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # whatever transformers raises for a config
        raise ReshardError(
            "transformers-unknown-model",
            "transformers does not know the model and could not load the trained weights",
            file=str(folder),
            found=f"{type(error).__name__}: {error}".split("\n")[0],
            remedy="update transformers, or correct config.json",
        ) from None


def saved(output: Path) -> list[Path]:
    """The checkpoints of an output that were saved completely, the latest last.

    They are those up to the one that the tracker file names; if it is missing, as in a copy, those that list their
    files.
    """
    steps = {step: path for step, path in iterations.found_in(output).items() if isinstance(step, int)}
    try:
        tracked = int((output / iterations.TRACKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return [path for path in steps.values() if (path / SAVED_FILE).is_file()]
    before = [path for step, path in steps.items() if step < tracked]
    return [*before, output / iterations.name_of(tracked)]
