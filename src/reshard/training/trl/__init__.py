"""The TRL engine: the methods of `trl_methods.py` on transformers, TRL, accelerate and PEFT.

`config_fields.py`, `batches.py`, `checks.py` and `memory_estimate.py` are used before launch, `rank_training.py` runs
on each rank. Importing this package imports none of the frameworks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem
from reshard.training.data.tokens import Sample
from reshard.training.engine import (
    Checkpoints,
    Engine,
    EngineChecks,
    Estimates,
    SequenceReading,
    StepCounts,
    Trained,
    sizes_in_words,
)
from reshard.training.methods import generates
from reshard.training.run import Run
from reshard.training.show.metrics import MetricsWriter
from reshard.training.trl import checks, memory_estimate, quantized, step_cost, vllm_checks
from reshard.training.trl.batches import batches_of, evaluation_of, precision_of
from reshard.training.trl.checkpoint_folders import saved
from reshard.training.trl.config_fields import known, options_of
from reshard.training.trl.run_data import learning_of
from reshard.training.trl.trl_methods import TRL_METHODS

NEEDS = {
    "torch": ">=2.6",
    "transformers": ">=5",
    "trl": ">=1.16,<1.17",
    "accelerate": ">=1.15",
    "peft": ">=0.21",
    "datasets": ">=3",
}


def _requires(run: Run) -> Mapping[str, str]:
    needed = {**NEEDS, "deepspeed": ">=0.16"} if run.parallel.startswith("zero") else NEEDS
    return {**needed, "bitsandbytes": ">=0.46.1"} if quantized.bits(run.options) else needed


def _plan(run: Run, world_size: int) -> list[str]:
    """The parallelism in words: FSDP2; or TP2, FSDP2 over 4; or base in 4 bits, DDP. One process has none."""
    bits = quantized.bits(run.options)
    base = [f"base in {bits} bits"] if bits else []
    if run.parallel == "ddp":
        return [*base, *(["DDP"] if world_size > 1 else [])]
    if run.parallel != "tp":
        return [run.parallel.upper(), *sizes_in_words(run.layout)]
    replicas = max(run.layout.replicas(world_size), 1)
    return [*sizes_in_words(run.layout), *([f"FSDP2 over {replicas}"] if replicas > 1 else [])]


def _reading(run: Run, options: Mapping[str, Any], record: Mapping[str, Any]) -> SequenceReading:
    """TRL limits no prompts. It infers the shape of DPO data from the first record, so it must not be mixed."""
    packed = bool(options.get("packing"))
    limit = None if generates(run.method) else int(options.get("max_length") or 0) or None
    learning, mixed = learning_of(options), run.method == "sft"
    return SequenceReading("max_length", limit, learning, packed=packed, full=packed, mixed=mixed)


def _batches(run: Run, world_size: int, samples: int, tokens: int | None = None) -> StepCounts:
    """Packed samples fill sequences of the maximum length."""
    options = options_of(run)
    found = batches_of(run, options, world_size, samples)
    if options.get("packing") and found.length and tokens is not None:
        return batches_of(run, options, world_size, -(-tokens // found.length))
    return found


def _interval(options: Mapping[str, Any]) -> float | None:
    strategy, steps = str(options.get("save_strategy")), float(options.get("save_steps") or 0)
    return steps if strategy.endswith("steps") and steps >= 1 else None


def _shares(run: Run, world_size: int) -> tuple[int, int]:
    weights = run.parallel in ("fsdp2", "zero3", "tp")
    return (world_size if weights else 1), (world_size if weights or run.parallel == "zero2" else 1)


def _fewer(run: Run) -> str:
    """A run that is resumed needs the optimizer in its checkpoints."""
    less = "" if run.resume else ", or no optimizer with --save_only_model"
    return f"keep fewer with --save_total_limit 1{less}"


def _warm(run: Run) -> bool:
    """Import what TRL needs first; not with DeepSpeed, which would look for devices before the rank has set its own."""
    return not run.parallel.startswith("zero") and bool(TRL_METHODS[run.method].trainer_class())


def _train(run: Run, monitor: MetricsWriter) -> Trained:
    from reshard.training.trl.rank_training import train_here

    return train_here(run, monitor)


def _sampler(run: Run, options: Mapping[str, Any], tokenizer: Any) -> Callable[[Any], list[Sample]]:
    from reshard.training.trl.image_training import samples_of

    return samples_of(run, options, tokenizer)


def _check(run: Run, trained: Trained, final: Path) -> list[Problem]:
    from reshard.training.trl.final_check import differences

    return differences(run, trained, final)


def _bound(run: Run) -> dict[str, Any]:
    only_model = str(run.options.get("save_only_model", False)).lower()
    return {"parallel": run.parallel, "tp": run.layout.tp, "save_only_model": only_model}


ENGINE = Engine(
    name="trl",
    title="TRL",
    methods=tuple(TRL_METHODS),
    packages=(
        *("torch", "transformers", "trl", "accelerate", "peft", "datasets", "tokenizers", "safetensors"),
        *("deepspeed", "flash-attn", "bitsandbytes"),
    ),
    requires=_requires,
    known_options=known,
    options=options_of,
    looks=EngineChecks(checks.asked, checks.machine, checks.model, checks.loaded),
    reading=_reading,
    batches=_batches,
    precision=lambda run: precision_of(run, options_of(run)),
    dtypes=("dtype",),
    evaluation=lambda run: evaluation_of(options_of(run)),
    plan=_plan,
    estimates=Estimates(
        memory_estimate.parts,
        memory_estimate.parallelisms,
        memory_estimate.savings,
        memory_estimate.smaller_batch,
        step_cost.work_of,
        lambda run: vllm_checks.share(options_of(run)),
    ),
    checkpoints=Checkpoints(
        pattern="checkpoint-*",
        name=lambda step: f"checkpoint-{step}",
        saved=saved,
        expected="checkpoint-*",
        interval=_interval,
        shares=_shares,
        fewer=_fewer,
        bound=_bound,
    ),
    warm=_warm,
    train=_train,
    check=_check,
    sampler=_sampler,
    leaves=(".data-*",),
    tracks=True,
)
