"""Evaluations between steps: their loss does not depend on the parallelism, and they do not affect training."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from reshard.training.run import Run
from reshard.training.trl.weights import reshard

if TYPE_CHECKING:
    Base = Any
else:
    Base = object


class Evaluating(Base):  # type: ignore[misc]
    """A mixin for TRL's trainers, for their evaluations."""

    asked: Run

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's evaluation, with the random state of training restored afterwards."""
        if self.asked.layout.tp > 1:
            self.gather_function = self._of_one_rank
        with undisturbed():
            measured = super().evaluate(*args, **kwargs)
        if self.asked.parallel == "fsdp2":
            reshard(self.model)
        elif self.asked.parallel == "zero3":
            # After an evaluation, ZeRO-3 has prefetched weights, which cannot be gathered for saving.
            self.model_wrapped.empty_partition_cache()
        return measured

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """transformers' loader, from which each rank takes complete batches.

        accelerate fills up the last batches with samples from the beginning, which would then count in the loss.
        Other methods gather measurements of each sample, for which the batches of all ranks must have equal sizes.
        """
        loader = super().get_eval_dataloader(eval_dataset)
        if self.asked.method == "sft":
            take_whole_batches(loader.batch_sampler)
        return loader

    def _of_one_rank(self, losses: Any, **given: Any) -> Any:
        """The losses of a batch, computed by tensor-parallel ranks together; those of padding samples are removed."""
        state = self.accelerator.gradient_state
        return losses[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else losses


def take_whole_batches(sampler: Any) -> None:
    """Make a sampler of accelerate give each rank the batches of a single process; after the last, it starts over."""
    from accelerate.data_loader import BatchSamplerShard

    class Whole(BatchSamplerShard):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            batches = list(self.batch_sampler)
            for turn in range(len(self)):
                yield batches[(turn * self.num_processes + self.process_index) % len(batches)]

    if isinstance(sampler, BatchSamplerShard):
        sampler.__class__ = Whole


@contextmanager
def undisturbed() -> Iterator[None]:
    """A context that restores the random state at its end.

    Even a DataLoader that does not shuffle draws a random number.
    """
    import numpy as np
    import torch

    there = torch.cuda.is_available() and torch.cuda.is_initialized()
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([torch.cuda.current_device()] if there else []):
        yield
    random.setstate(before[0])
    np.random.set_state(before[1])
