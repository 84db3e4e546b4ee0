"""Samples per step, steps per run, and bytes per parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from reshard.base.errors import Problem, ReshardError, when
from reshard.checks import grpo
from reshard.folders.companions import CONFIG
from reshard.training.engine import StateBytes, StepCounts
from reshard.training.findings_as_problems import of_violation
from reshard.training.methods import generates, is_rewarded
from reshard.training.run import Run

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def batches_of(run: Run, options: Mapping[str, Any], world_size: int, samples: int) -> StepCounts:
    """The batches of a run. With `packing`, the number of steps is an upper bound. Raises ReshardError."""
    wrong = [*alien_parallelism(run)] or [*_ranks(run, world_size)] or [*_groups(run, options, world_size)]
    if wrong:
        raise ReshardError(wrong)
    replicas = run.layout.replicas(world_size)
    per_device = int(options["per_device_train_batch_size"])
    accumulation = int(options["gradient_accumulation_steps"])
    rows = _rows(run, options, replicas, samples)
    batches = ceil(rows / (per_device * replicas))
    updates = max(ceil(batches / accumulation), 1)
    limit = int(options["max_steps"])
    steps = limit if limit > 0 else ceil(float(options["num_train_epochs"]) * updates)
    # TRL does not limit prompts, so that of a sequence that is generated is the limit of its completion.
    length = options["max_completion_length" if generates(run.method) else "max_length"]
    return StepCounts(per_device, accumulation, replicas, steps, int(length or 0))


def alien_parallelism(run: Run) -> Iterator[Problem]:
    """A problem of parallelism that TRL does not have, so that the ranks cannot be counted."""
    alien = [name for name in ("pp", "vpp", "cp") if getattr(run.layout, name) > 1]
    yield from when(
        alien,
        "trl-parallelism-unsupported",
        "TRL has no pipeline or context parallelism here",
        found=", ".join(f"--{name} {getattr(run.layout, name)}" for name in alien),
        remedy=f"use --engine megatron; or pass --parallel fsdp2 without {_flags(alien)} to shard the model",
    )


def plan_instead(run: Run, plan: str = "fsdp2") -> str:
    """What to do instead of tensor parallelism: another plan, which has none of its sizes."""
    sizes = [name for name in ("tp", "ep") if getattr(run.layout, name) > 1]
    return f"use --parallel {plan}" + (f" without {_flags(sizes)}" if sizes else "")


def _flags(names: list[str]) -> str:
    return " and ".join(f"--{name}" for name in names)


def _ranks(run: Run, world_size: int) -> Iterator[Problem]:
    if world_size % run.layout.tp:
        yield Problem(
            "ranks-not-divisible-by-tp",
            "the ranks cannot be divided into tensor-parallel groups",
            found=f"{world_size} ranks, --tp {run.layout.tp}",
            remedy=f"pass --nproc {run.layout.tp}, or choose --tp as a divisor of {world_size}",
        )
    elif run.parallel == "tp" and run.layout.tp != world_size:
        yield from _beside_tensor_parallelism(run, world_size)
    yield from when(
        run.layout.ep not in (1, run.layout.tp),
        "trl-experts-follow-tp",
        "TRL shards experts over the tensor-parallel ranks",
        found=f"--ep {run.layout.ep} with --tp {run.layout.tp}",
        remedy="pass --parallel tp with the same --tp and --ep, or use --engine megatron",
    )


def _beside_tensor_parallelism(run: Run, world_size: int) -> Iterator[Problem]:
    """Features not known to work with transformers' FSDP2 over groups of tensor-parallel ranks."""
    wrong = {
        "--lora": run.lora,  # adapters are made after sharding: their gradients are not averaged
        run.method.upper(): generates(run.method),
        f"--ep {run.layout.ep}": run.layout.ep > 1,
        "--eval-data": run.eval_data is not None,  # accelerate counts some of the records twice
        "a head that is tied to the embedding": _is_tied(run),  # its second step has another loss
    }
    for what in (name for name, asked in wrong.items() if asked):
        yield Problem(
            "tensor-and-data-parallel",
            f"{what} cannot combine tensor and data parallelism here",
            found=f"{world_size} ranks, --tp {run.layout.tp}",
            remedy=f"pass --nproc {run.layout.tp} or --tp {world_size}; or {plan_instead(run)}",
        )


def _is_tied(run: Run) -> bool:
    """Whether the head is tied, as transformers reads the config: some families are tied if the config does not say."""
    if not (run.model / CONFIG).is_file():
        return False
    from transformers import AutoConfig

    trusted = bool(run.options.get("trust_remote_code"))
    config = AutoConfig.from_pretrained(str(run.model), trust_remote_code=trusted)
    return bool(getattr(config.get_text_config(), "tie_word_embeddings", False))


def _groups(run: Run, options: Mapping[str, Any], world_size: int) -> Iterator[Problem]:
    """Problems of generations and evaluation steps that do not consist of complete groups of completions."""
    if not is_rewarded(run.method):
        return
    numbers, replicas = grpo.numbers_of(options) or {}, run.layout.replicas(world_size)
    total, group = grpo.generated(numbers, replicas), numbers["num_generations"]
    found = f"{total} completions on {replicas} ranks with different data, groups of {group}"
    for violation in grpo.cut_groups(numbers, replicas):
        yield replace(of_violation(violation), file=None, found=found)
    if run.eval_data is None or str(options["eval_strategy"]) == "no":
        return
    group = int(options["num_generations_eval"] or options["num_generations"])
    per_device = int(options["per_device_eval_batch_size"])
    yield from when(
        per_device * replicas % group,
        "grpo-evaluation-groups-cut",
        "the completions of an evaluation batch are not complete groups",
        rule="the completions of a prompt are compared with each other",
        expected=f"a multiple of {group}",
        found=f"--per_device_eval_batch_size {per_device} on {replicas} ranks with different data",
        remedy=f"pass --per_device_eval_batch_size {ceil(per_device / group) * group}, or leave it out",
    )


def evaluation_of(options: Mapping[str, Any]) -> str:
    """When evaluations run, in words: `once an epoch, 8 at a time`."""
    strategy, steps = str(options["eval_strategy"]), float(options["eval_steps"] or options["logging_steps"])
    often = f"every {steps:g} steps" if steps >= 1 else f"every {steps:.0%} of the steps"
    when = {"no": [], "epoch": ["once an epoch"], "steps": [often]}[strategy]
    when += ["before the first step"] if options["eval_on_start"] else []
    if not when:
        return "never, by --eval_strategy no"
    return f"{' and '.join(when)}, {options['per_device_eval_batch_size']} at a time on each rank"


def _rows(run: Run, options: Mapping[str, Any], replicas: int, samples: int) -> int:
    """Rows per epoch. TRL draws complete generations; GRPO and RLOO repeat each prompt for its group."""
    if not generates(run.method):
        return samples
    numbers = grpo.numbers_of({"num_generations": 1, **options}) or {}
    group = numbers["num_generations"]
    prompts = grpo.generated(numbers, replicas) // group
    return samples // prompts * prompts * group * int(options.get("num_iterations", 1))


def precision_of(run: Run, options: Mapping[str, Any]) -> StateBytes:
    """Bytes of a trained parameter: weight, gradient, and AdamW's two moments.

    DeepSpeed also keeps float32 copies of 16-bit weights. LoRA adapters are always float32, as is what FSDP2 trains in
    mixed precision.
    """
    mixed = bool(options["bf16"] or options["fp16"])
    raised = run.lora or (run.parallel == "fsdp2" and mixed)
    weights = 4 if raised else DTYPE_BYTES.get(str(options["dtype"]), 4)
    copies = 4 if run.parallel.startswith("zero") and weights == 2 else 0
    moments = 8 if copies else 2 * weights
    return StateBytes(
        weights=weights,
        gradients=weights,
        optimizer=moments + copies,
        activations=2 if mixed else 4,
        recomputation=bool(options["gradient_checkpointing"]),
    )
