"""Evaluations between steps: the mean loss over the tokens that the loss covers, on held-out data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from reshard.training.data.pretokenized import IGNORED_LABEL
from reshard.training.megatron.indexed_datasets import IndexedRows
from reshard.training.megatron.packed_rows import LABELS, RowArray
from reshard.training.megatron.rank_setup import Trainee, gather_weights
from reshard.training.megatron.training_step import over_all_ranks, run_schedule


class Evaluations:
    """When evaluations run, and on which rows: every `eval_interval` steps, or once per epoch; and after the last step.

    `epoch` is the number of steps in an epoch of the training data.
    """

    def __init__(self, trainee: Trainee, rows: RowArray | IndexedRows, epoch: int) -> None:
        options, steps = trainee.options, trainee.steps
        self._trainee = trainee
        self._interval = options.eval_interval or max(epoch, 1)
        self._rows = rows
        self._count = min(len(rows), (options.eval_iters or len(rows)) * steps.sequences)

    def due(self, step: int) -> bool:
        """Whether an evaluation follows step `step` (from 1)."""
        return step == self._trainee.steps.total or step % self._interval == 0

    def loss(self) -> float:
        """The mean loss over the tokens of all rows, independent of the layout; collective."""
        import torch

        parts = list(self._parts())
        with torch.no_grad(), _in_evaluation(self._trainee):
            results = run_schedule(self._trainee, parts, forward_only=True)
        return over_all_ranks(results, 0)[0]

    def _parts(self) -> Iterator[RowArray]:
        """The microbatches of this replica. The last ones are filled up with rows without loss."""
        from megatron.core import parallel_state as ps

        steps, layout = self._trainee.steps, self._trainee.run.layout
        unit = steps.micro * steps.replicas * (layout.pp if layout.vpp > 1 else 1)
        first = steps.micro * ps.get_data_parallel_rank()
        for at in range(first, -(-self._count // unit) * unit, steps.micro * steps.replicas):
            part = self._rows[at : min(at + steps.micro, self._count)]
            lacking = steps.micro - len(part)
            if lacking:
                filler = np.zeros((lacking, *self._rows.shape[1:]), self._rows.dtype)
                filler[:, LABELS] = IGNORED_LABEL
                part = np.concatenate([part, filler])
            yield part


@contextmanager
def _in_evaluation(trainee: Trainee) -> Iterator[None]:
    """Disable dropout and the losses that balance experts."""
    gather_weights(trainee)
    for module in trainee.wrapped:
        module.eval()
    yield
    for module in trainee.wrapped:
        module.train()
