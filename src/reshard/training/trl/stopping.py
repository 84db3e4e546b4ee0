"""Stop a TRL run early: on a signal, or if its loss or gradient is NaN or infinite."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

from reshard.training import signals
from reshard.training.collective import highest
from reshard.training.divergence import Divergence, assert_finite, beginnings, diverged, few
from reshard.training.methods import is_rewarded
from reshard.training.run import Run
from reshard.training.show.monitor import Metrics

if TYPE_CHECKING:
    Base = Any
else:
    Base = object


class Stopping(Base):  # type: ignore[misc]
    """A mixin for TRL's trainers that checks each step, however seldom it logs."""

    asked: Run
    monitor: Metrics
    _losses: Any = 0.0
    """The sum of this rank's losses since the last optimizer step."""
    _last: Any = ()
    """The last inputs of this rank."""
    _looked: int | None = None
    """The last step that was checked."""
    _signal: int = 0
    """The highest number of a signal that any rank received."""
    stopped: signals.Stopped | None = None
    """What to raise after transformers' loop has ended."""

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

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The same for an evaluation during which the signal comes."""
        return signals.with_steady_workers(super().get_eval_dataloader(eval_dataset))

    def _between_samples(self) -> bool:
        """Whether a resumed run would continue unchanged from here: a resumed GRPO run generates anew."""
        if not is_rewarded(self.asked.method):
            return True
        every = self.args.steps_per_generation * self.args.num_iterations
        return bool(every <= self.args.gradient_accumulation_steps or self._step % every == 0)

    def _stopped(self) -> signals.Stopped:
        saved = None if self.divergence.going else self.asked.output / f"checkpoint-{self._looked}"
        return signals.Stopped(self._signal, self._looked, saved, "its loss or its gradient is not finite")

    def _is_finite(self, loss: float, norm: float | None) -> bool:
        """Whether loss and norm are finite. fp16 steps skipped because gradients overflowed do not count."""
        skipped = self.accelerator.optimizer_step_was_skipped
        return math.isfinite(loss) and (norm is None or skipped or math.isfinite(norm))

    def _records(self) -> list[str]:
        """The beginnings of this rank's last records: prompts of a model that generates, otherwise tokens."""
        if isinstance(self._last, list):
            return few(str(row.get("prompt")) for row in self._last)
        ids = next(
            (
                self._last[name]
                for name in ("input_ids", "prompt_input_ids", "prompt_ids")
                if name in self._last
            ),
            (),
        )
        return beginnings(self.processing_class, ids)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save finite weights only, so that no usable checkpoint is removed for an unusable one."""
        if self.divergence.going:  # as at the end of an epoch
            return
        trained = ((name, each) for name, each in self.model.named_parameters() if each.requires_grad)
        assert_finite(self.state.global_step, trained, self.asked.model)
        super()._save_checkpoint(model, trial)
