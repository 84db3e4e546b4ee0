"""Samples per step, steps per run, and bytes per parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass

from reshard.algebra.layout import Layout
from reshard.base.errors import Problem, ReshardError
from reshard.training.data.mix import are_indexed
from reshard.training.engine import StateBytes, StepCounts
from reshard.training.megatron.options import MegatronOptions, read
from reshard.training.planning.gpu_models import has_gpu
from reshard.training.run import Run

DEFAULT_BATCH = 16
"""Default number of sequences per step."""


@dataclass(frozen=True)
class RunSteps:
    """The number of sequences per step, and of steps."""

    replicas: int
    micro: int
    sequences: int
    total: int

    @property
    def microbatches(self) -> int:
        """Microbatches of one rank in one step."""
        return self.sequences // (self.micro * self.replicas)


def steps_of(options: MegatronOptions, layout: Layout, world_size: int, sequences: int) -> RunSteps:
    """The steps of a run over `sequences` of data. Raises ReshardError naming everything that does not divide."""
    check_ranks(options, layout, world_size)
    replicas = layout.replicas(world_size)
    unit = options.micro_batch_size * replicas * (layout.pp if layout.vpp > 1 else 1)
    size = options.global_batch_size or -(-DEFAULT_BATCH // unit) * unit
    if size % unit:
        below = size // unit * unit
        raise ReshardError(
            "batch-not-divisible",
            "the batch is not divisible by the ranks",
            rule="micro_batch_size × data parallel ranks" + (" × pp, with virtual stages" * (layout.vpp > 1)),
            expected=f"a multiple of {unit}",
            found=f"global_batch_size {size}",
            remedy=f"choose --global_batch_size {below + unit}" + (f" or {below}" if below else ""),
        )
    total = options.train_iters or max(1, math.ceil(sequences * options.train_epochs / size - 1e-9))
    return RunSteps(replicas, options.micro_batch_size, size, total)


def schedule(options: MegatronOptions, steps: RunSteps) -> tuple[int, int]:
    """Steps of the decay, and of the warm-up in it. Raises ReshardError if no steps remain after the warm-up."""
    decay = options.lr_decay_iters or steps.total
    warmup = options.lr_warmup_iters
    if warmup is None:
        warmup = int(options.lr_warmup_fraction * decay)
    if warmup >= decay:
        raise ReshardError(
            "warm-up-too-long",
            "the warm-up is as long as the run",
            expected=f"less than {decay} steps",
            found=f"lr_warmup_iters {warmup}",
            remedy="lower lr_warmup_iters or lr_warmup_fraction, or raise train_iters",
        )
    return decay, warmup


def check_ranks(options: MegatronOptions, layout: Layout, world_size: int) -> None:
    """Raise ReshardError if ranks or sequence length are not divisible by the layout."""
    problems = []
    model_ranks = layout.tp * layout.pp * layout.cp
    if world_size % model_ranks:
        problems.append(
            Problem(
                "ranks-not-divisible",
                "the ranks are not divisible by the layout",
                rule="tp × pp × cp ranks form one copy of the model",
                expected=f"a multiple of {model_ranks} processes",
                found=f"{world_size} process{'es' * (world_size > 1)} for {_sizes(layout)}",
                remedy=f"pass --nproc {model_ranks} or a multiple of it, or choose other sizes",
            )
        )
    etp = options.expert_tensor_parallel_size or layout.tp
    if layout.ep > 1 and not problems and world_size // layout.pp % (layout.ep * etp):
        problems.append(
            Problem(
                "ranks-not-divisible-by-experts",
                "the ranks of a stage are not divisible by those of the experts",
                rule="ep × expert_tensor_parallel_size ranks form one copy of all experts",
                expected=f"a multiple of {layout.ep * etp} ranks of a stage",
                found=f"{world_size // layout.pp} ranks of a stage, --ep {layout.ep}, experts on {etp} tensor ranks",
                remedy="choose another --ep, or --expert_tensor_parallel_size 1",
            )
        )
    problems += _length_problems(options, layout)
    if problems:
        raise ReshardError(problems)


def _sizes(layout: Layout) -> str:
    return " ".join(
        f"--{name} {getattr(layout, name)}" for name in ("tp", "pp", "cp") if getattr(layout, name) > 1
    )


def _length_problems(options: MegatronOptions, layout: Layout) -> list[Problem]:
    length = options.seq_length or 0
    cut = layout.tp * layout.cp * (2 if layout.cp > 1 else 1)
    if length % cut == 0:
        return []
    return [
        Problem(
            "sequence-not-divisible",
            "the sequence length is not divisible by the ranks that share a sequence",
            rule="sequence-parallel and context-parallel ranks take equal parts",
            expected=f"a multiple of {cut}",
            found=f"seq_length {length}",
            remedy=f"choose --seq_length {-(-length // cut) * cut}",
        )
    ]


def batches(run: Run, world_size: int, samples: int, tokens: int | None = None) -> StepCounts:
    """The batches of a run. The number of sequences with packed samples is forecast from records, not `tokens`."""
    options = read(run)
    if run.layout.cp > 1 or options.transformer_impl:
        uses_transformer_engine(options, run.layout)
    sequences = samples
    if options.pack and not options.train_iters and not are_indexed(run.data.paths):
        from reshard.training.megatron.packed_rows import forecast

        sequences = forecast(run, options, samples)
    steps = steps_of(options, run.layout, world_size, sequences)
    schedule(options, steps)
    return StepCounts(
        per_device=steps.micro,
        accumulation=steps.microbatches,
        replicas=steps.replicas,
        steps=steps.total,
        length=options.seq_length or 0,
    )


def precision(run: Run) -> StateBytes:
    """Bytes of a parameter's weight, gradient and optimizer states, as Megatron's DDP and optimizer keep them.

    Gradients are summed in float32. With 16-bit weights the optimizer also keeps float32 main weights. Sharding by the
    distributed optimizer is not counted here.
    """
    options = read(run)
    halves = is_half(options)
    return StateBytes(
        weights=2 if halves else 4,
        gradients=2 if options.grad_reduce_in_bf16 and halves else 4,
        optimizer=12 if halves else 8,
        activations=2 if halves else 4,
        recomputation=options.recompute_granularity == "full",
    )


def is_half(options: MegatronOptions) -> bool:
    """Whether weights have 16 bits. The default is bfloat16 on a GPU."""
    if options.fp32 or options.bf16 is False:
        return options.fp16
    return options.fp16 or bool(options.bf16) or has_gpu()


def uses_transformer_engine(options: MegatronOptions, layout: Layout) -> bool:
    """Whether TransformerEngine's layers are used. Raises ReshardError for options that the layers do not support."""
    there = _has_transformer_engine()
    wanted = options.transformer_impl or ("transformer_engine" if there and has_gpu() else "local")
    if wanted == "transformer_engine" and not there:
        raise ReshardError(
            "transformer-engine-not-installed",
            "TransformerEngine is not installed",
            found="--transformer_impl transformer_engine",
            remedy="pip install transformer_engine[pytorch], or --transformer_impl local",
        )
    if wanted == "local" and layout.cp > 1:
        raise ReshardError(
            "context-parallel-needs-transformer-engine",
            "context parallel attention needs TransformerEngine",
            rule="the local spec's attention needs the complete sequence on each rank",
            found=f"--cp {layout.cp} with the local spec",
            remedy="leave out --cp, or install TransformerEngine on a machine with GPUs",
        )
    return wanted == "transformer_engine"


def _has_transformer_engine() -> bool:
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError):
        return False
    return True
