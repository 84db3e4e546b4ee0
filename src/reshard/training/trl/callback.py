"""A callback of transformers' Trainer that reports to the monitor and asserts the plan."""

from __future__ import annotations

import resource
from collections.abc import Collection, Mapping
from numbers import Real
from typing import Any

import torch

from reshard.training import signals
from reshard.training.methods import generates
from reshard.training.run import Run
from reshard.training.show.metrics import MetricsWriter
from reshard.training.trl.assertions import WeightChange, assert_plan

COUNTED_VALUES = ("epoch", "num_tokens", "total_flos")
"""Values in trainers' logs that are not measurements."""
TIMED_VALUES = ("runtime", "samples_per_second", "steps_per_second")
"""The same in logs of evaluations, whose seconds are reported separately."""
KEPT_STEP_GROWTH = 1.1
"""Growth of the step number after which answers are kept again, so that long runs do not keep too many."""


def callback_of(run: Run, monitor: MetricsWriter) -> Any:
    """A TrainerCallback for a run, whose `trainer` is set before training."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):  # type: ignore[misc]
        """Asserts the plan before the first step and motion after it, and reports every step."""

        trainer: Any = None
        _motion: WeightChange | None = None
        _tokens = 0.0
        _sampled = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            assert_plan(run, self.trainer)
            self._motion = WeightChange(self.trainer.model)
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
            if generates(run.method):
                tokens /= run.layout.tp  # TRL counts on each rank; SFT and DPO divide already
            monitor.step(
                state.global_step,
                **_measured(logs, COUNTED_VALUES),
                tokens=float(tokens),
                memory=float(_memory()),
            )
            if state.global_step >= self._sampled * KEPT_STEP_GROWTH or state.global_step == state.max_steps:
                self._sampled = state.global_step
                if answers := _answers(self.trainer):
                    monitor.samples(state.global_step, answers)

        def on_evaluate(
            self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **given: Any
        ) -> None:
            own = {name: value for name, value in metrics.items() if name.startswith("eval_")}
            found = _measured(own, [f"eval_{name}" for name in (*COUNTED_VALUES, *TIMED_VALUES)])
            monitor.evaluated(state.global_step, **found, seconds=float(metrics["eval_runtime"]))

    return Watch()


def _measured(logs: Mapping[str, Any], left_out: Collection[str]) -> dict[str, float]:
    """All numbers in a log; they depend on the method."""
    return {
        name: float(value) for name, value in logs.items() if name not in left_out and isinstance(value, Real)
    }


def _answers(trainer: Any) -> list[dict[str, Any]]:
    """The last answers of the model, if the method generates any: TRL keeps the last batch (`_logs`)."""
    kept = getattr(trainer, "_logs", None) or {}
    columns = {**{name: kept.get(name, ()) for name in ("prompt", "completion")}, **kept.get("rewards", {})}
    return [
        {name: _text(value) for name, value in zip(columns, row, strict=True)}
        for row in zip(*columns.values(), strict=False)
    ]


def _text(value: Any) -> Any:
    """Messages as text, with the roles if there are several."""
    if not isinstance(value, list):
        return value
    turns = [each for each in value if isinstance(each, Mapping)]
    if len(turns) == 1:
        return str(turns[0].get("content"))
    return "\n".join(f"{each.get('role')}: {each.get('content')}" for each in turns)


def _stepped(trainer: Any) -> bool:
    """Whether this step can have changed a weight: not in a warm-up from zero, nor if fp16 overflowed."""
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    return any(rates) and not trainer.accelerator.optimizer_step_was_skipped


def _memory() -> int:
    """Peak memory of this rank in bytes: on its GPU, or on the host if it has none."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
