"""A run of the Megatron engine, from its first collective to its last."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reshard.base.errors import ReshardError
from reshard.folders import iterations
from reshard.training import signals
from reshard.training.data.mix import are_indexed
from reshard.training.divergence import Divergence, assert_finite, diverged
from reshard.training.engine import Trained
from reshard.training.evaluation import evaluated
from reshard.training.megatron import assertions, indexed_datasets, packed_rows, run_checkpoints
from reshard.training.megatron.batches import RunSteps, steps_of, uses_transformer_engine
from reshard.training.megatron.evaluations import Evaluations
from reshard.training.megatron.indexed_datasets import IndexedRows, SequentialOrder
from reshard.training.megatron.options import MegatronOptions, read
from reshard.training.megatron.rank_setup import Trainee, open_weights, prepare, start
from reshard.training.megatron.training_step import StepMeasures, records, run_step
from reshard.training.run import Run
from reshard.training.show.metrics import MetricsWriter

MONITORED = ("loss", "learning_rate", "grad_norm", "tokens", "memory")
"""Values of a step that the monitor receives."""


def train(run: Run, monitor: MetricsWriter) -> Trained:
    """Load, assert the plan, train, save. Called on each rank, with the launcher's environment set."""
    import torch

    options = read(run)
    transformer_engine = uses_transformer_engine(options, run.layout)
    alone = not torch.distributed.is_initialized()
    sizes = start(run, options)
    weights = open_weights(run, options, transformer_engine)
    vocab = weights.model.dims.vocab
    data, steps = _data(run, options, vocab, monitor)
    held_out = _held_out(run, options, vocab, monitor) if run.eval_data else None
    trainee = prepare(run, options, steps, sizes, weights, transformer_engine)
    monitor.note(assertions.assert_plan(trainee))
    if run.lora and weights.model.dims.experts:
        monitor.note("experts are not adapted: an adapter of PEFT has no place for the pair of each of them")
    done = run_checkpoints.resume(trainee) if run.resume else 0
    if run.resume and not done:
        monitor.note("no checkpoint to resume from: training starts at the beginning")
    monitor.begin(steps.total, done)
    signals.hold()
    epoch = -(-len(data) // steps.sequences)
    evaluations = Evaluations(trainee, held_out, epoch) if held_out is not None else None
    last = _train(trainee, data, evaluations, done, monitor)
    found = assertions.digests(trainee)
    if torch.distributed.get_rank() == 0:
        packed_rows.remove_rows(run)
    torch.distributed.barrier()
    if alone:
        torch.distributed.destroy_process_group()
    return Trained(run.output / iterations.name_of(last), last, found)


def _data(
    run: Run, options: MegatronOptions, vocab: int, monitor: MetricsWriter
) -> tuple[packed_rows.RowArray | IndexedRows, RunSteps]:
    """The training data of a run, and its steps."""
    import torch

    world_size = torch.distributed.get_world_size()
    if not are_indexed(run.data.paths):
        data = _rows(run, options, vocab, monitor)
        return data, steps_of(options, run.layout, world_size, len(data))
    steps = steps_of(
        options, run.layout, world_size, indexed_datasets.sequences_of(run.data, options.seq_length or 0)
    )
    return indexed_datasets.open_rows(run, options, steps.total * steps.sequences, vocab), steps


def _held_out(
    run: Run, options: MegatronOptions, vocab: int, monitor: MetricsWriter
) -> packed_rows.RowArray | IndexedRows:
    """The evaluation data of a run."""
    as_trained = evaluated(run)
    if not are_indexed(as_trained.data.paths):
        return _rows(as_trained, options, vocab, monitor, "to evaluate on: ")
    sequences = indexed_datasets.sequences_of(as_trained.data, options.seq_length or 0)
    return indexed_datasets.open_rows(as_trained, options, sequences, vocab)


def _rows(
    run: Run, options: MegatronOptions, vocab: int, monitor: MetricsWriter, which: str = ""
) -> packed_rows.RowArray:
    """The rows of the data: rank 0 writes them, and all others map the file. `which` precedes notes about them."""
    import torch

    told: list[Any] = ["", [], []]
    if torch.distributed.get_rank() == 0:
        try:
            told[0] = packed_rows.key_of(run, options)
            told[1] = packed_rows.store_rows(run, options, told[0], vocab)
        except ReshardError as error:
            told[2] = error.problems
    torch.distributed.broadcast_object_list(told)
    key, notes, problems = told
    if problems:
        raise ReshardError(problems)
    for note in notes:
        monitor.note(which + note)
    return packed_rows.open_rows(run, key)


def _train(
    trainee: Trainee,
    data: packed_rows.RowArray | IndexedRows,
    evaluations: Evaluations | None,
    done: int,
    monitor: MetricsWriter,
) -> int:
    """Train the steps after `done`. Returns the step of the last checkpoint. Raises Stopped after a signal."""
    options, total = trainee.options, trainee.steps.total
    order = (SequentialOrder if isinstance(data, IndexedRows) else packed_rows.RowOrder)(
        len(data), options.seed
    )
    change = assertions.WeightChange(trainee)
    divergence = Divergence(trainee.run.nan_steps, trainee.run.model)
    applied = done
    for step in range(done, total):
        measured = run_step(trainee, data, order, step)
        if measured.applied:
            applied += 1
            change.check(measured.learning_rate)
        else:
            monitor.note(
                f"step {step + 1} was left out: gradients overflowed, the scale of the loss is lowered"
            )
        shown = {name: value for name, value in measured._asdict().items() if name in MONITORED}
        monitor.step(step + 1, **shown)
        divergence.add(finite=measured.is_finite(overflows=options.fp16))
        divergence.check_base()
        if divergence.going:
            if divergence.stops or step + 1 == total:
                took = records(trainee, data, order, step)
                raise diverged(step + 1, measured.grad_norm, measured.learning_rate, measured.own, took)
            _stop(measured, step + 1, why="its loss or its gradient is not finite")
            continue  # after divergence, neither evaluate nor save
        due = evaluations is not None and evaluations.due(step + 1)
        if due and measured.signal:
            monitor.note(signals.unevaluated(step + 1))
        elif due and evaluations:
            began = time.monotonic()
            loss = evaluations.loss()
            monitor.evaluated(step + 1, eval_loss=loss, seconds=time.monotonic() - began)
        if not applied:
            _stop(measured, step + 1, why="all gradients have overflowed so far")
        every = options.save_interval
        if step + 1 == total or (every and (step + 1) % every == 0) or measured.signal:
            _stop(measured, step + 1, _saved(trainee, step + 1, applied, monitor))
    return max(done, total)


def _saved(trainee: Trainee, step: int, applied: int, monitor: MetricsWriter) -> Path:
    """Save the checkpoint of a step."""
    if not applied:
        raise _nothing_applied(step)
    assert_finite(step, _parameters(trainee), trainee.run.model)
    saved = run_checkpoints.save(trainee, step)
    monitor.saved(saved)
    return saved


def _stop(measured: StepMeasures, step: int, saved: Path | None = None, why: str = "") -> None:
    """Raise Stopped if a rank has received a signal."""
    if measured.signal:
        raise signals.StoppedRun(measured.signal, step, saved, why)


def _parameters(trainee: Trainee) -> Iterator[tuple[str, Any]]:
    """The parameters that this rank trains."""
    for chunk in trainee.chunks:
        yield from ((name, each) for name, each in chunk.named_parameters() if each.requires_grad)


def _nothing_applied(steps: int) -> ReshardError:
    return ReshardError(
        "no-step-changed-weights",
        "no step has changed the weights: all gradients overflowed",
        found=f"{steps} steps in float16",
        remedy="train in bfloat16 (--bf16) or float32 (--fp32), or train longer, until the loss scale has decreased",
    )
