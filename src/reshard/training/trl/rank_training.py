"""What each rank runs, from the launcher's environment to the last checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reshard.base.errors import ReshardError
from reshard.training import rewards
from reshard.training.collectives import meet
from reshard.training.damaged_checkpoints import reading
from reshard.training.engine import Trained
from reshard.training.engine_registry import engine_of, final_dtype
from reshard.training.methods import is_rewarded
from reshard.training.run import Run
from reshard.training.show.metrics import MetricsWriter
from reshard.training.trl import adapter_checks, image_training, live_weights, model_loading, rank_device
from reshard.training.trl.callback import callback_of
from reshard.training.trl.config_fields import options_of
from reshard.training.trl.run_data import RunData, rows_of
from reshard.training.trl.trainer_arguments import arguments_of, model_arguments
from reshard.training.trl.trainer_overrides import TrainerOverrides
from reshard.training.trl.trl_methods import TRL_METHODS


def train_here(run: Run, monitor: MetricsWriter) -> Trained:
    """Train on this rank. Raises ReshardError if a check fails, and whatever the frameworks raise."""
    options = options_of(run)
    rank_device.start(options, deepspeed=run.parallel.startswith("zero"))
    if options["use_cpu"]:
        rank_device.allow_cpu()
    checkpoint = _checkpoint(run, monitor)
    arguments = arguments_of(run, options)  # before any model: ZeRO-3 partitions what is loaded after it
    if checkpoint:  # the run that saved it has evaluated before its first step
        arguments.eval_on_start = False
    tokenizer = model_loading.tokenizer_of(run, options)
    with rows_of(run, options, tokenizer, monitor) as data:
        processing = image_training.prepare(run, arguments, options, tokenizer, data.train.column_names)
        with reading(run, checkpoint):
            model = model_loading.model_of(run, options, checkpoint)
            trainer = _trainer(run, monitor, arguments, options, model, processing, data)
            if checkpoint and run.lora and not run.parallel.startswith("zero"):
                model_loading.load_adapter(trainer.model, checkpoint)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if trainer.stopped:
            raise trainer.stopped
        return _finish(run, trainer, checkpoint)


def _checkpoint(run: Run, monitor: MetricsWriter) -> Path | None:
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
    monitor: MetricsWriter,
    arguments: Any,
    options: dict[str, Any],
    model: Any,
    tokenizer: Any,
    data: RunData,
) -> Any:
    """TRL's trainer of a run with our mixin. Nothing is wrapped or sharded yet."""
    from transformers import PrinterCallback, set_seed

    if option := next((name for name in ("packing", "padding_free") if options.get(name)), None):
        check_packing(run, model, option)
    way, rewarded = TRL_METHODS[run.method], is_rewarded(run.method)
    more: dict[str, Any] = {"reward_funcs": [rewards.load(each) for each in run.reward]} if rewarded else {}
    shared = run.lora or bool(options.get("precompute_ref_log_probs"))
    if way.reference(options) and not rewarded and run.parallel == "fsdp2" and not shared:
        more["ref_model"] = model_loading.sharded(run.model, options, model_arguments(run, options))
    if way.teacher:
        more["teacher_model"] = model_loading.teacher_of(run, options, arguments)
    if run.lora:
        more["peft_config"] = adapter_checks.adapter_config(options, model)
    save_only = arguments.save_only_model
    arguments.save_only_model = save_only or run.parallel == "tp"
    base, callback = way.trainer_class(), callback_of(run, monitor)
    own = {"asked": run, "monitor": monitor, "loraplus": options["loraplus_lr_ratio"]}
    trainer = type(base.__name__, (TrainerOverrides, base), own)(
        model=model,
        args=arguments,
        train_dataset=data.train,
        eval_dataset=data.evaluation,
        processing_class=tokenizer,
        callbacks=[callback],
        **more,
    )
    if run.parallel == "ddp" and rank_device.world_size() == 1:
        rank_device.be_alone()
    # Trainer refuses optimizers of models that were sharded on loading; `_save_optimizer…` saves them.
    arguments.save_only_model = save_only
    if run.lora and run.layout.tp > 1:
        model_loading.mend_adapter(trainer.model)
    if rewarded and run.layout.tp > 1:
        # They compute one model and must draw the same completion; TRL seeds each process as if its data differed.
        set_seed(arguments.seed + rank_device.rank() // run.layout.tp)
    trainer.remove_callback(PrinterCallback)  # the monitor has the numbers; so errors stay visible in the log
    callback.trainer = trainer
    return trainer


def check_packing(run: Run, model: Any, option: str = "packing") -> None:
    """Raise ReshardError if samples that share a sequence would attend to each other in a model.

    TRL numbers the positions of each sample from 0, which the masks and kernels of transformers' own attention use.
    """
    if getattr(model, "_supports_attention_backend", False) and not getattr(model, "_is_stateful", False):
        return
    raise ReshardError(
        "model-mixes-packed-samples",
        "samples that share a sequence would see each other in this model",
        file=str(run.model),
        rule="transformers keeps packed samples apart in its own attention; not in states that run through a "
        "sequence, nor in a model's own attention",
        found=f"--{option} with {type(model).__name__}",
        remedy=f"leave out --{option}",
    )


def _finish(run: Run, trainer: Any, checkpoint: Path | None) -> Trained:
    """Save the last step if no checkpoint has it, and take the digests of the trained weights."""
    step = int(trainer.state.global_step)
    last = run.output / f"checkpoint-{step}"
    if last not in (trainer.last_saved, checkpoint):
        trainer._save_checkpoint(trainer.model_wrapped, None)
    digests = live_weights.digests_of(trainer.model, final_dtype(run))
    meet()
    return Trained(last, step, digests)
