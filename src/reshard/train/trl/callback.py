"""What transformers' Trainer tells while it trains, carried to the monitor; and the assertions on the way."""

from __future__ import annotations

import resource
from typing import Any

from reshard.train import signals
from reshard.train.engine import Monitor
from reshard.train.run import Run
from reshard.train.trl.assertions import Motion, assert_plan

NAMES = ("loss", "learning_rate", "grad_norm")
MORE = (
    *("mean_token_accuracy", "entropy", "reward", "reward_std", "kl", "completions/mean_length"),
    *("rewards/margins", "rewards/accuracies"),
)
"""What methods log besides."""


def callback_of(run: Run, monitor: Monitor) -> Any:
    """A TrainerCallback for a run; give it the trainer with `watch`."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):  # type: ignore[misc]
        """Asserts the plan before the first step, motion after it, and reports every step."""

        trainer: Any = None
        _motion: Motion | None = None
        _tokens = 0.0

        def watch(self, trainer: Any) -> None:
            """Look at this trainer from now on."""
            self.trainer = trainer

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            assert_plan(run, self.trainer)
            self._motion = Motion(self.trainer.model)
            self._tokens = float(state.num_input_tokens_seen)
            monitor.begin(state.max_steps, state.global_step)
            signals.hold()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if self._motion is None or not _stepped(self.trainer):
                return
            self._motion.assert_moved()
            self._motion = None

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
            if not logs or "loss" not in logs:
                return
            tokens, self._tokens = logs.get("num_tokens", 0) - self._tokens, logs.get("num_tokens", 0)
            if run.method == "grpo":
                tokens /= run.layout.tp  # which TRL counts on each rank; SFT and DPO divide by themselves
            told = {name: float(logs[name]) for name in (*NAMES, *MORE) if name in logs}
            monitor.step(state.global_step, **told, tokens=float(tokens), memory=float(_memory()))

        def on_evaluate(
            self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **given: Any
        ) -> None:
            told = {f"eval_{name}": metrics.get(f"eval_{name}") for name in ("loss", *MORE)}
            found = {name: float(value) for name, value in told.items() if value is not None}
            monitor.evaluated(state.global_step, **found, seconds=float(metrics["eval_runtime"]))

    return Watch()


def _stepped(trainer: Any) -> bool:
    """Whether this step can have moved a weight: not in a warm-up that begins at zero, nor where fp16 overflowed."""
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    return any(rates) and not trainer.accelerator.optimizer_step_was_skipped


def _memory() -> int:
    """The most bytes that this rank has used: of its GPU, or of the host where there is none."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
