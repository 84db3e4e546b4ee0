"""Computation and communication of a Megatron-Core step, for estimates of its speed."""

from __future__ import annotations

from reshard.training.engine import StateBytes, StepCounts
from reshard.training.megatron.memory_estimate import parameters_of
from reshard.training.megatron.options import read
from reshard.training.memory.activations import LayerWidths
from reshard.training.planning.step_time import StepWork, Traffic, flops_of_token, passes
from reshard.training.run import Run, config_of


def work_of(run: Run, batches: StepCounts, precision: StateBytes, world_size: int) -> StepWork:
    """The work of one GPU in a step: its average share of the stages. Raises ReshardError."""
    options, layout = read(run), run.layout
    widths = LayerWidths.of(config_of(run.model))
    micro = batches.per_device * batches.length // layout.cp
    shared = layout.tp * layout.pp
    each = passes(recomputed=precision.recomputation, frozen=run.lora)
    hidden = float(micro * widths.hidden * precision.activations * batches.accumulation)
    layers = widths.layers / layout.pp
    again = 1 + precision.recomputation / 2
    exchanged = 4 * again * max(widths.experts, 1) * hidden * widths.sparse / layout.pp
    held = parameters_of(run, options)
    copies = world_size // (shared * layout.cp)
    distributed = precision.weights if options.use_distributed_optimizer else precision.gradients
    reduced = held * (precision.gradients + distributed)
    waiting = layout.pp - 1
    return StepWork(
        flops=micro * batches.accumulation * flops_of_token(widths, batches.length) * each / shared,
        hidden=(Traffic(float(reduced), copies * layout.cp, layout.tp),),
        waited=(
            Traffic(2 * 4 * again * layers * hidden if layout.tp > 1 else 0.0, layout.tp),
            Traffic(exchanged, layout.ep, layout.tp),
            Traffic(2 * 2 * hidden if layout.pp > 1 else 0.0, layout.pp, world_size // layout.pp),
        ),
        idle=waiting / (layout.vpp * batches.accumulation + waiting),
    )
