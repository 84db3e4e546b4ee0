"""What each rank runs, from the launcher's environment to the last checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reshard.base.errors import ReshardError
from reshard.training.collective import meet
from reshard.training.engine import Trained
from reshard.training.engines import engine_of, final_dtype
from reshard.training.reading import reading
from reshard.training.run import Run
from reshard.training.show.monitor import Metrics
from reshard.training.trl import arithmetic, checks, devices, loading, vision, weights
from reshard.training.trl.arguments import arguments_of
from reshard.training.trl.callback import callback_of
from reshard.training.trl.config_fields import options_of
from reshard.training.trl.rows import Data, rows_of
from reshard.training.trl.trainers import trainer_of


def train_here(run: Run, monitor: Metrics) -> Trained:
    """Train on this rank. Raises ReshardError if a check fails, and whatever the frameworks raise."""
    options = options_of(run)
    if wrong := list(checks.variables(run, options)):
        raise ReshardError(wrong)
    devices.start(options, deepspeed=run.parallel.startswith("zero"))
    if options["use_cpu"]:
        devices.allow_cpu()
    checkpoint = _checkpoint(run, monitor)
    arguments = arguments_of(run, options)  # before any model: ZeRO-3 partitions what is loaded after it
    if checkpoint:  # the run that saved it has evaluated before its first step
        arguments.eval_on_start = False
    tokenizer = loading.tokenizer_of(run, options)
    with rows_of(run, options, tokenizer, monitor) as data:
        arithmetic.batches_of(run, options, devices.world_size(), len(data.train))
        processing = vision.prepare(run, arguments, options, tokenizer, data.train.column_names)
        with reading(run, checkpoint):
            trainer = _trainer(run, monitor, arguments, options, processing, data, checkpoint)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if trainer.stopped:
            raise trainer.stopped
        return _finish(run, trainer, checkpoint)


def _checkpoint(run: Run, monitor: Metrics) -> Path | None:
    """The checkpoint from which to continue, with `--resume`."""
    if not run.resume:
        return None
    checkpoint = engine_of(run).checkpoints.last(run.output)
    if checkpoint is None:
        monitor.note("there is no complete checkpoint: training starts from the beginning")
    else:
        monitor.note(f"continues from {checkpoint.name}")
    return checkpoint


def _trainer(
    run: Run,
    monitor: Metrics,
    arguments: Any,
    options: dict[str, Any],
    tokenizer: Any,
    data: Data,
    checkpoint: Path | None,
) -> Any:
    model = loading.model_of(run, options, checkpoint)
    callback = callback_of(run, monitor)
    trainer = trainer_of(run, monitor, arguments, options, model, tokenizer, data, callback)
    if checkpoint and run.lora and not run.parallel.startswith("zero"):
        loading.load_adapter(trainer.model, checkpoint)
    return trainer


def _finish(run: Run, trainer: Any, checkpoint: Path | None) -> Trained:
    """Save the last step if no checkpoint has it, and take the digests of the trained weights."""
    step = int(trainer.state.global_step)
    last = run.output / f"checkpoint-{step}"
    if last not in (trainer.last_saved, checkpoint):
        trainer._save_checkpoint(trainer.model_wrapped, None)
    digests = weights.digests_of(trainer.model, final_dtype(run))
    meet()
    return Trained(last, step, digests)
