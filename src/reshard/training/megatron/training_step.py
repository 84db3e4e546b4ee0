"""One optimizer step: microbatches in Megatron's schedule, and the mean loss over all tokens that it covers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from reshard.training import signals
from reshard.training.collectives import highest
from reshard.training.data.pretokenized import IGNORED_LABEL
from reshard.training.data.tokens import load_tokenizer
from reshard.training.divergence import beginnings
from reshard.training.megatron.indexed_datasets import IndexedRows
from reshard.training.megatron.packed_rows import (
    INPUTS,
    LABELS,
    SAMPLES,
    RowArray,
    RowOrder,
    rank_tokens,
    sample_bounds,
)
from reshard.training.megatron.rank_setup import Trainee


class StepMeasures(NamedTuple):
    """Measurements of a step. `tokens` counts all tokens except padding.

    `applied` is false if float16 gradients overflowed and the step was skipped.
    """

    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    memory: int
    applied: bool
    own: float | None
    """The loss of this rank; None if it computes none."""
    signal: int
    """The highest signal that any rank has received, 0 if none."""

    def is_finite(self, *, overflows: bool) -> bool:
        """Whether loss and gradient norm are finite; with `overflows` (fp16 skips such steps) only the loss counts."""
        return math.isfinite(self.loss) and (overflows or math.isfinite(self.grad_norm))


class Microbatch(NamedTuple):
    """The model's input on a rank: [micro, length], reduced to this rank's part by context parallelism."""

    tokens: Any
    labels: Any
    counted: Any
    positions: Any
    mask: Any
    """[micro, 1, length, length], true where a token is masked; None if `packed` is used instead."""
    packed: Any


def run_step(trainee: Trainee, rows: RowArray | IndexedRows, order: RowOrder, step: int) -> StepMeasures:
    """Train step `step` (from 0), whether or not its result is finite."""

    steps = trainee.steps
    for module in trainee.wrapped:
        module.zero_grad_buffer()
    trainee.optimizer.zero_grad()
    mine = _own_rows(trainee, order, step)
    parts = [rows[mine[at : at + steps.micro]] for at in range(0, len(mine), steps.micro)]
    results = run_schedule(trainee, parts)
    rate = float(trainee.optimizer.param_groups[0]["lr"])
    succeeded, norm, _ = trainee.optimizer.step()
    if succeeded:
        trainee.scheduler.step(increment=steps.sequences)
    seen = sum(_seen(part) for part in parts)
    loss, tokens, (memory, heard) = over_all_ranks(results, seen)
    own = _own_loss(results)
    return StepMeasures(loss, rate, float(norm or 0.0), tokens, memory, bool(succeeded), own, heard)


def _own_rows(trainee: Trainee, order: RowOrder, step: int) -> list[int]:
    """The rows that this rank computes in a step."""
    from megatron.core import parallel_state as ps

    steps = trainee.steps
    return order.of_step(step, steps.sequences, ps.get_data_parallel_rank(), steps.replicas)


def _own_loss(results: list[dict[str, Any]]) -> float | None:
    """The mean loss of this rank's microbatches, on the last pipeline stage and one of its tensor-parallel ranks."""
    from megatron.core import parallel_state as ps

    if not results or ps.get_tensor_model_parallel_rank():
        return None
    total, tokens = (float(value) for value in sum(result["loss"].double() for result in results))
    return total / max(tokens, 1.0)


def records(trainee: Trainee, rows: RowArray | IndexedRows, order: RowOrder, step: int) -> list[str]:
    """The beginnings of the last records that this rank used in step `step` (from 0)."""
    tokenizer = load_tokenizer(trainee.run.model)
    samples = (
        row[INPUTS, begin:end]
        for row in (rows[index] for index in reversed(_own_rows(trainee, order, step)))
        for begin, end in pairwise(sample_bounds(row[SAMPLES]))
        if (row[LABELS, begin:end] != IGNORED_LABEL).any()
    )
    return beginnings(tokenizer, samples)


def run_schedule(
    trainee: Trainee, parts: list[RowArray], *, forward_only: bool = False
) -> list[dict[str, Any]]:
    """Run Megatron's schedule over this rank's microbatches. Returns `_loss`'s values of each on the last stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    wrapped = trainee.wrapped
    batches = [partial(_microbatch, part, trainee) for part in parts]
    width, height = _shape(trainee)
    found: list[dict[str, Any]] = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=[iter(batches) for _ in wrapped] if len(wrapped) > 1 else iter(batches),
        model=wrapped if len(wrapped) > 1 else wrapped[0],
        num_microbatches=len(batches),
        seq_length=width,
        micro_batch_size=height,
        decoder_seq_length=width,
        forward_only=forward_only,
    )
    return found


def _shape(trainee: Trainee) -> tuple[int, int]:
    """Tokens and sequences that stages pass on. TransformerEngine takes all sequences as one long one."""
    length = trainee.options.seq_length or 0
    if trainee.transformer_engine:
        return length * trainee.steps.micro, 1
    return length, trainee.steps.micro


def _seen(part: RowArray) -> int:
    """Tokens of a microbatch without padding, which is the last sample of a row."""
    padding = sum(
        int((row[SAMPLES] == row[SAMPLES, -1]).sum())
        for row in part
        if (row[LABELS, row[SAMPLES] == row[SAMPLES, -1]] == IGNORED_LABEL).all()
    )
    return int(part.shape[0] * part.shape[2]) - padding


def _microbatch(part: RowArray, trainee: Trainee) -> Microbatch:
    """The rows of a microbatch as tensors on this rank's device."""
    import torch
    from megatron.core import parallel_state as ps

    flat = trainee.transformer_engine
    places = _own_places(part, ps.get_context_parallel_rank(), trainee.layout.cp) if flat else None

    def tensor(values: Any) -> Any:
        own = values if places is None else values.reshape(1, -1)[:, places]
        return torch.from_numpy(own.astype(np.int64)).to(torch.cuda.current_device())

    labels = part[:, LABELS]
    return Microbatch(
        tokens=tensor(part[:, INPUTS]),
        labels=tensor(np.where(labels == IGNORED_LABEL, 0, labels)),
        counted=tensor(labels != IGNORED_LABEL),
        positions=tensor(np.stack([_positions(row[SAMPLES]) for row in part])),
        mask=None if flat else _mask(tensor(part[:, SAMPLES])),
        packed=_packed(part) if flat else None,
    )


def _positions(samples: Any) -> Any:
    """Positions, counted from zero in each sample.

    Rotary embeddings of the local spec count through the row, which is equivalent: attention depends only on
    differences of positions.
    """
    bounds = np.asarray(sample_bounds(samples))
    return np.arange(len(samples)) - np.repeat(bounds[:-1], np.diff(bounds))


def _mask(samples: Any) -> Any:
    """The attention mask: later tokens, and tokens of other samples."""
    import torch

    length = samples.shape[1]
    later = torch.ones(length, length, dtype=torch.bool, device=samples.device).triu(1)
    return (later | (samples[:, :, None] != samples[:, None, :]))[:, None]


def _packed(part: RowArray) -> Any:
    """The bounds of all samples, for TransformerEngine's attention over one long sequence."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    length = part.shape[2]
    bounds = [0]
    for index, row in enumerate(part):
        bounds += [index * length + end for end in sample_bounds(row[SAMPLES])[1:]]
    places = torch.tensor(bounds, dtype=torch.int32, device=torch.cuda.current_device())
    longest = int(np.diff(bounds).max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=places,
        cu_seqlens_kv=places,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _own_places(part: RowArray, rank: int, size: int) -> Any:
    """The positions of this context-parallel rank in the concatenated rows."""
    length = part.shape[2]
    return np.concatenate(
        [index * length + rank_tokens(row[SAMPLES], rank, size) for index, row in enumerate(part)]
    )


def _forward(batches: Iterator[Any], model: Any) -> tuple[Any, Any]:
    batch = next(batches)()
    output = model(
        batch.tokens,
        batch.positions,
        batch.mask,
        labels=batch.labels,
        loss_mask=batch.counted,
        packed_seq_params=batch.packed,
    )
    return output, partial(_loss, batch.counted)


def _loss(counted: Any, output: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The sum over tokens that the loss covers, and their number; Megatron divides by that of the whole step."""
    import torch

    weights = counted.reshape(-1).float()
    total = (output.float().reshape(-1) * weights).sum()
    tokens = weights.sum()
    return total, tokens.to(torch.int), {"loss": torch.stack([total.detach(), tokens])}


def over_all_ranks(results: list[dict[str, Any]], seen: int) -> tuple[float, int, tuple[int, ...]]:
    """Mean loss and tokens over all data-parallel ranks; peak memory in bytes and the signal over all ranks."""
    import torch
    from megatron.core import parallel_state as ps

    device = torch.cuda.current_device()
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    alone = ps.get_tensor_model_parallel_rank() == 0
    if results and alone:  # the last stage
        totals[:2] = sum(result["loss"].double() for result in results)
    if alone and ps.get_pipeline_model_parallel_rank() == 0 and ps.get_context_parallel_rank() == 0:
        totals[2] = seen
    torch.distributed.all_reduce(totals)
    return float(totals[0] / totals[1].clamp(min=1)), int(totals[2]), highest(_memory(), signals.heard())


def _memory() -> int:
    """The peak memory so far: of the GPU, or of the process without one."""
    import resource

    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
