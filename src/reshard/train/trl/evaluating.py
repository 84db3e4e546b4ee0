"""Evaluations between steps: the same loss however the model is spread, and training that does not notice them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from reshard.train.run import Run
from reshard.train.trl.weights import reshard

if TYPE_CHECKING:
    Base = Any
else:
    Base = object


class Evaluating(Base):  # type: ignore[misc]
    """What is put before a trainer of TRL for its evaluations."""

    asked: Run

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL does, with the random numbers of training left as they are."""
        if self.asked.layout.tp > 1:
            self.gather_function = self._of_one_rank
        with undisturbed():
            measured = super().evaluate(*args, **kwargs)
        if self.asked.parallel == "fsdp2":
            reshard(self.model)
        elif self.asked.parallel == "zero3":
            # An evaluation ends with weights fetched ahead for a next one, which cannot be gathered to be saved.
            self.model_wrapped.empty_partition_cache()
        return measured

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Transformers', of which each rank takes whole batches.

        accelerate fills up the last ones with samples from the beginning, which the loss of these batches then holds.
        DPO and GRPO gather what they measure of each sample, for which batches of all ranks have to be of one size.
        """
        loader = super().get_eval_dataloader(eval_dataset)
        if self.asked.method == "sft":
            take_whole_batches(loader.batch_sampler)
        return loader

    def _of_one_rank(self, losses: Any, **given: Any) -> Any:
        """The losses of a batch, which tensor parallel ranks compute together; of the last one those that it has."""
        state = self.accelerator.gradient_state
        return losses[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else losses


def take_whole_batches(sampler: Any) -> None:
    """Let a sampler of accelerate give each rank batches as one process would see them; behind the last, the first."""
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
    """A context after which random numbers are those that would have come without it.

    Even a DataLoader that shuffles nothing draws one.
    """
    import numpy as np
    import torch

    there = torch.cuda.is_available() and torch.cuda.is_initialized()
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([torch.cuda.current_device()] if there else []):
        yield
    random.setstate(before[0])
    np.random.set_state(before[1])
