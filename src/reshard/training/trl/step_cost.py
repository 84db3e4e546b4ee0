"""Computation and communication of a TRL step, for estimates of its speed."""

from __future__ import annotations

from reshard.training.engine import StateBytes, StepCounts
from reshard.training.memory.activations import LayerWidths
from reshard.training.planning.step_time import StepWork, Traffic, flops_of_token, passes
from reshard.training.run import Run, config_of
from reshard.training.trl.config_fields import options_of
from reshard.training.trl.memory_estimate import ParameterCounts, sizes_of
from reshard.training.trl.trl_methods import TRL_METHODS


def work_of(run: Run, batches: StepCounts, precision: StateBytes, world_size: int) -> StepWork:
    """The work of one GPU in a step. Raises ReshardError for a config without sizes."""
    options = options_of(run)
    sizes, widths = sizes_of(run, options), LayerWidths.of(config_of(run.model))
    tp = run.layout.tp
    micro = batches.per_device * TRL_METHODS[run.method].sequences * batches.length
    forward = flops_of_token(widths, batches.length)
    each = passes(recomputed=precision.recomputation, frozen=run.lora)
    reduced = 4 * (1 + precision.recomputation / 2) * widths.layers if tp > 1 else 0
    hidden = micro * widths.hidden * precision.activations
    return StepWork(
        flops=micro * batches.accumulation * forward * each / tp,
        hidden=_spread(run, sizes, batches, precision, world_size),
        waited=(Traffic(2.0 * reduced * hidden * batches.accumulation, tp),),
    )


def _spread(
    run: Run, sizes: ParameterCounts, batches: StepCounts, precision: StateBytes, world_size: int
) -> tuple[Traffic, ...]:
    """Weights gathered for each pass of each batch, if they are sharded; gradients once per step."""
    tp, kind = run.layout.tp, run.parallel
    ranks = world_size // tp
    gradients = sizes.trained / tp * (precision.gradients if kind == "ddp" else precision.activations)
    if kind in ("ddp", "zero2"):
        return (Traffic(2.0 * gradients, ranks, tp),)
    gathered = 2.0 * sizes.all / tp * precision.activations * batches.accumulation
    return (Traffic(gathered + gradients, ranks, tp),)
