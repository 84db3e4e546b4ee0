"""A callback of transformers' Trainer: checks of the model, checkpoints on signals, and no checkpoint with NaN.

It uses public hooks only, so it works with any Trainer of transformers or TRL, with or without a guard around it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from reshard.base.errors import ReshardError
from reshard.runs.guard.in_script import check
from reshard.runs.guard.options import GuardOptions
from reshard.runs.guard.supervise.signal_passing import STOPPED
from reshard.runs.guard.watch.loss_lines import NanRule, not_finite, read_record

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals of schedulers, launchers and terminals before they end a process."""
SECOND_PRESS_SECONDS = 2.0
"""Seconds after which another Ctrl-C counts as a second one: launchers also forward the terminal's to the ranks."""
_REMEDY = (
    "lower the learning rate or warm up longer, look for damaged records, and resume from the last checkpoint"
)


class GuardCallback(TrainerCallback):  # type: ignore[misc]
    """Keeps a run of a Trainer safe; see `reshard.guard.callback`."""

    def __init__(self, nan_steps: int = GuardOptions.nan_steps) -> None:
        self._nan_rule = NanRule(nan_steps)
        self._signals: ReceivedSignals | None = None
        self._stopped_by = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Check the model and the optimizer, and listen for signals from now on."""
        check(given["model"], given.get("optimizer"))
        _assert_sharded(given["model"], args)
        args.logging_nan_inf_filter = False  # it would log a NaN loss as the average of earlier steps
        self._stopped_by = 0
        self._signals = ReceivedSignals()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Stop after this step with a checkpoint if any rank received a signal."""
        received = highest(self._signals.first) if self._signals else 0
        if received and _resumes_unchanged(args, state.global_step):
            self._stopped_by = received
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # it could take longer than the time that is left
        self._check_before_saving(control, state, given["model"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The same for checkpoints at the end of an epoch."""
        self._check_before_saving(control, state, given["model"])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        """Raise ReshardError by the guard's rule for losses that are NaN or infinite; meanwhile save nothing."""
        reading = read_record(logs or {})
        bad = self._nan_rule.add(reading.loss, f"step {state.global_step}")
        if bad:
            control.should_save = False
        if self._nan_rule.ends(bad):
            self._stop_listening()
            raise ReshardError(not_finite(bad, reading.loss, reading.norm))

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Write config and tokenizer into a checkpoint of shards, for which the Trainer saves tensors alone."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        adapters = getattr(given["model"], "peft_config", {})
        names = ("adapter_config.json", "config.json")
        if not state.is_world_process_zero or any((folder / name).exists() for name in names):
            return
        for each in (*(adapters.values() or [given["model"].config]), given.get("processing_class")):
            if hasattr(each, "save_pretrained"):
                each.save_pretrained(folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Exit with 128 + N if signal N stopped the run, so that nobody takes it for finished."""
        self._stop_listening()
        if self._stopped_by:
            if state.is_local_process_zero:
                print(STOPPED.format(signal.Signals(self._stopped_by).name, state.global_step), flush=True)
            raise SystemExit(128 + self._stopped_by)

    def _stop_listening(self) -> None:
        if self._signals:
            self._signals.restore()
            self._signals = None

    def _check_before_saving(self, control: Any, state: Any, model: Any) -> None:
        """Raise ReshardError on all ranks if weights that are about to be saved are NaN or infinite."""
        if not control.should_save:
            return
        wrong = next(_nonfinite(model.named_parameters()), None)
        if highest(int(wrong is not None)):
            self._stop_listening()
            raise ReshardError(
                "weights-diverged",
                "training diverged: weights are NaN or infinite, and are not saved",
                found=f"step {state.global_step}: {wrong or 'weights of another rank'}",
                remedy=_REMEDY,
            )


class ReceivedSignals:
    """The first of `ENDING_SIGNALS` that this process receives; ignored ones, as under nohup, stay ignored."""

    def __init__(self) -> None:
        self.first = 0
        self._at = 0.0
        self._process = os.getpid()
        handled = [each for each in ENDING_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        self._before = {each: signal.signal(each, self._handle) for each in handled}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a worker of a DataLoader, which the last step still needs
        now = time.monotonic()
        if self.first and number == signal.SIGINT and now - self._at > SECOND_PRESS_SECONDS:
            self.restore()
            raise KeyboardInterrupt
        self.first, self._at = self.first or number, self._at or now

    def restore(self) -> None:
        """Put the earlier handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _assert_sharded(model: Any, args: Any) -> None:
    """Raise ReshardError if accelerate was told to shard the model by FSDP or DeepSpeed, and did not."""
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    sharded = {
        "FSDP": any(isinstance(each, FSDPModule | FullyShardedDataParallel) for each in model.modules()),
        "DEEPSPEED": args.distributed_state.distributed_type is DistributedType.DEEPSPEED,
    }
    for plan, is_sharded in sharded.items():
        if os.environ.get(f"ACCELERATE_USE_{plan}", "").lower() in ("true", "1") and not is_sharded:
            raise ReshardError(
                "guard-model-not-sharded",
                f"the model is not sharded, though accelerate's config requests {plan}",
                rule="accelerate shards on GPUs only; elsewhere each rank silently keeps the complete model",
                remedy=f"start the run on GPUs, or take {plan} out of accelerate's config",
            )


def highest(value: int) -> int:
    """The highest value over all ranks. Every rank must call it."""
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return value
    device = torch.cuda.current_device() if dist.get_backend() == "nccl" else "cpu"
    shared = torch.tensor(value, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return int(shared)


def _resumes_unchanged(args: Any, step: int) -> bool:
    """Whether a run that continues from this step is the same: GRPO and RLOO generate for several steps at once."""
    generated = getattr(args, "steps_per_generation", None)
    if not generated:
        return True
    micro_steps = step * args.gradient_accumulation_steps
    return bool(micro_steps % (generated * getattr(args, "num_iterations", 1)) == 0)


def _nonfinite(parameters: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Names of trained parameters whose shard on this rank has NaN or infinite values."""
    for name, parameter in parameters:
        shard = getattr(parameter, "ds_tensor", parameter).detach()  # DeepSpeed ZeRO-3
        shard = shard.to_local() if hasattr(shard, "to_local") else shard  # DTensor
        if parameter.requires_grad and not bool(shard.isfinite().all()):
            yield name
