"""What reshard changes in TRL's trainers: checkpoints of our own, checked steps, and undisturbed evaluations."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from reshard.training import signals
from reshard.training.collectives import highest, meet
from reshard.training.damaged_checkpoints import reading
from reshard.training.divergence import Divergence, assert_finite, beginnings, diverged, first_few
from reshard.training.methods import is_rewarded
from reshard.training.run import Run
from reshard.training.show.metrics import MetricsWriter
from reshard.training.trl import checkpoint_folders, checkpoint_saving, rank_device
from reshard.training.trl.live_weights import reshard

SHARDED_PLANS = ("fsdp2", "tp")
"""Plans under which parameters and optimizer states are DTensors."""

if TYPE_CHECKING:
    Base = Any
else:
    Base = object


class TrainerOverrides(Base):  # type: ignore[misc]
    """A mixin for TRL's trainers, which saves complete weights under every plan, and checks each step.

    Optimizers whose states are DTensors are saved by torch's distributed checkpoint, so that runs can resume from them.
    A run stops early on a signal, or if its loss or gradient is NaN or infinite. Evaluations do not depend on the
    parallelism, and do not affect training.
    """

    asked: Run
    monitor: MetricsWriter
    loraplus: float | None = None
    """The factor between the learning rates of lora_B and lora_A."""
    last_saved: Path | None = None
    optimizer: Any
    _losses: Any = 0.0
    """The sum of this rank's losses since the last optimizer step."""
    _last: Any = ()
    """The last inputs of this rank."""
    _looked: int | None = None
    """The last step that was checked."""
    _signal: int = 0
    """The highest number of a signal that any rank received."""
    stopped: signals.StoppedRun | None = None
    """What to raise after transformers' loop has ended."""

    def create_optimizer(self, model: Any = None) -> Any:
        """transformers' optimizer, or PEFT's with two learning rates."""
        if self.loraplus is None or self.optimizer is not None:
            return super().create_optimizer(model)
        from peft.optimizers import create_loraplus_optimizer

        model = self.model if model is None else model
        kind, given = self.get_optimizer_cls_and_kwargs(self.args, model)
        decay = self.args.weight_decay
        self.optimizer = create_loraplus_optimizer(
            model, kind, loraplus_lr_ratio=self.loraplus, loraplus_weight_decay=decay, **given
        )
        # PEFT makes empty groups, whose states torch's distributed checkpoint cannot load.
        groups = self.optimizer.param_groups
        groups[:] = [group for group in groups if group["params"]]
        return self.optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save weights, config and tokenizer. All ranks must call it."""
        checkpoint_saving.write(
            self.asked, self.model, self.processing_class, Path(output_dir or self.args.output_dir)
        )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save finite weights only. A checkpoint is complete with its record; only then are older ones removed."""
        if self.divergence.going:  # as at the end of an epoch
            return
        trained = ((name, each) for name, each in self.model.named_parameters() if each.requires_grad)
        assert_finite(self.state.global_step, trained, self.asked.model)
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        super()._save_checkpoint(model, trial)
        self.args.save_total_limit = limit
        self.last_saved = self.asked.output / f"checkpoint-{self.state.global_step}"
        meet()
        if rank_device.rank() == 0:
            checkpoint_saving.complete(self.asked, self.last_saved)
            checkpoint_folders.rotate(self.asked.output, limit, self.state.best_global_step)
            self.monitor.saved(self.last_saved)
        meet()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.asked.parallel not in SHARDED_PLANS:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        checkpoint_saving.save_optimizer(self.model, self.optimizer.optimizer, Path(output_dir))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder = Path(checkpoint) if checkpoint else None
        with reading(self.asked, folder):
            if self.asked.parallel not in SHARDED_PLANS or folder is None:
                super()._load_optimizer_and_scheduler(checkpoint)
                return
            checkpoint_saving.load_optimizer(self.model, self.optimizer.optimizer, folder)
            self.lr_scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with reading(self.asked, Path(checkpoint) if checkpoint else None):
            super()._load_rng_state(checkpoint)

    def _run_epoch(self, *given: Any, **named: Any) -> None:
        """transformers' epoch, but no step after the last: it would take one more from a checkpoint at `max_steps`."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*given, **named)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: no model card is needed."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing: the weights were already loaded from there."""

    @cached_property
    def divergence(self) -> Divergence:
        """Counts the steps that were not finite."""
        return Divergence(self.asked.nan_steps, self.asked.model)

    def training_step(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        """TRL's step; its inputs and loss are kept until the optimizer step."""
        loss = super().training_step(model, inputs, *given, **named)
        self._losses, self._last = self._losses + loss.detach(), inputs
        return loss

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *given: Any, **named: Any) -> None:
        """transformers' method; always logs a stopping step, but neither evaluates nor saves after divergence."""
        if self.state.global_step == self._looked:  # the end of an epoch
            if self.stopped:
                self.control.should_evaluate = self.control.should_save = False
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *given, **named)
            return
        if self._looked is None and not self.control.should_log:
            self.monitor.unlogged(self.state.global_step)
        self._looked = self.state.global_step
        loss, self._losses = float(self._losses), 0.0
        norm = None if grad_norm is None else float(grad_norm)
        bad, self._signal = highest(int(not self._is_finite(loss, norm)), signals.heard())
        self.divergence.add(finite=not bad)
        stops = bool(self._signal) and self._between_samples()
        if stops:  # an evaluation could take longer than the time that is left
            self.control.should_log = self.control.should_save = self.control.should_training_stop = True
            if self.control.should_evaluate:
                self.monitor.note(signals.unevaluated(self._looked))
        if stops or self.divergence.going:
            self.control.should_evaluate = False
        if self.divergence.going:
            self.control.should_save = False
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *given, **named)
        if stops:
            self.stopped = self._stopped()
        self.divergence.check_base()
        is_last = self._looked >= self.state.max_steps
        if self.divergence.going and (self.divergence.stops or is_last):
            rate = float(named.get("learning_rate") or self._get_learning_rate())
            raise diverged(self._looked, norm, rate, loss, self._records())

    def get_train_dataloader(self) -> Any:
        """TRL's loader with workers that survive a signal to all processes: the step needs their batches."""
        return signals.with_steady_workers(super().get_train_dataloader())

    def _between_samples(self) -> bool:
        """Whether a resumed run would continue unchanged from here: a resumed GRPO run generates anew."""
        if not is_rewarded(self.asked.method):
            return True
        every = self.args.steps_per_generation * self.args.num_iterations
        return bool(every <= self.args.gradient_accumulation_steps or self._step % every == 0)

    def _stopped(self) -> signals.StoppedRun:
        saved = None if self.divergence.going else self.asked.output / f"checkpoint-{self._looked}"
        return signals.StoppedRun(self._signal, self._looked, saved, "its loss or its gradient is not finite")

    def _is_finite(self, loss: float, norm: float | None) -> bool:
        """Whether loss and norm are finite. fp16 steps skipped because gradients overflowed do not count."""
        skipped = self.accelerator.optimizer_step_was_skipped
        return math.isfinite(loss) and (norm is None or skipped or math.isfinite(norm))

    def _records(self) -> list[str]:
        """The beginnings of this rank's last records: prompts of a model that generates, otherwise tokens."""
        if isinstance(self._last, list):
            return first_few(str(row.get("prompt")) for row in self._last)
        ids = next(
            (
                self._last[name]
                for name in ("input_ids", "prompt_input_ids", "prompt_ids")
                if name in self._last
            ),
            (),
        )
        return beginnings(self.processing_class, ids)

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
        """transformers' loader, from which each rank takes complete batches, with workers as those of training.

        accelerate fills up the last batches with samples from the beginning, which would then count in the loss.
        Other methods gather measurements of each sample, for which the batches of all ranks must have equal sizes.
        """
        loader = super().get_eval_dataloader(eval_dataset)
        if self.asked.method == "sft":
            take_whole_batches(loader.batch_sampler)
        return signals.with_steady_workers(loader)

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
    there = torch.cuda.is_available() and torch.cuda.is_initialized()
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([torch.cuda.current_device()] if there else []):
        yield
    random.setstate(before[0])
    np.random.set_state(before[1])
