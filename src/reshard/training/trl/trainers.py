"""TRL's trainers, with checkpoints of our own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.base.errors import ReshardError
from reshard.training import rewards
from reshard.training.collective import meet
from reshard.training.methods import is_rewarded
from reshard.training.reading import reading
from reshard.training.run import Run
from reshard.training.show.monitor import Metrics
from reshard.training.trl import devices, loading, saving
from reshard.training.trl.evaluating import Evaluating
from reshard.training.trl.methods import WAYS
from reshard.training.trl.rows import Data
from reshard.training.trl.stopping import Stopping

SHARDED = ("fsdp2", "tp")
"""Plans under which parameters and optimizer states are DTensors."""


if TYPE_CHECKING:
    Base = Any
else:
    Base = object


class Saving(Base):  # type: ignore[misc]
    """A mixin for TRL's trainers: complete weights under every plan, and self-contained checkpoints.

    Optimizers whose states are DTensors are saved by torch's distributed checkpoint, so that runs can resume from them.
    """

    asked: Run
    monitor: Metrics
    loraplus: float | None = None
    """The factor between the learning rates of lora_B and lora_A."""
    last_saved: Path | None = None
    optimizer: Any

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
        saving.write(self.asked, self.model, self.processing_class, Path(output_dir or self.args.output_dir))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint. It is complete once it has the record of the run; only then are older ones removed."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        super()._save_checkpoint(model, trial)
        self.args.save_total_limit = limit
        self.last_saved = self.asked.output / f"checkpoint-{self.state.global_step}"
        meet()
        if devices.rank() == 0:
            saving.complete(self.asked, self.last_saved)
            saving.rotate(self.asked.output, limit, self.state.best_global_step)
            self.monitor.saved(self.last_saved)
        meet()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        import torch

        if self.asked.parallel not in SHARDED:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        saving.save_optimizer(self.model, self.optimizer.optimizer, Path(output_dir))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        import torch

        folder = Path(checkpoint) if checkpoint else None
        with reading(self.asked, folder):
            if self.asked.parallel not in SHARDED or folder is None:
                super()._load_optimizer_and_scheduler(checkpoint)
                return
            saving.load_optimizer(self.model, self.optimizer.optimizer, folder)
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


def trainer_class(run: Run, monitor: Metrics, loraplus: float | None = None) -> Any:
    """TRL's trainer of a method, extended by our mixins."""
    base = WAYS[run.method].trainer_class()
    own = {"asked": run, "monitor": monitor, "loraplus": loraplus}
    return type(base.__name__, (Stopping, Saving, Evaluating, base), own)


def trainer_of(
    run: Run,
    monitor: Metrics,
    arguments: Any,
    options: dict[str, Any],
    model: Any,
    tokenizer: Any,
    data: Data,
    callback: Any,
) -> Any:
    """The trainer of a run. Nothing is wrapped or sharded yet."""
    from transformers import PrinterCallback

    if option := next((name for name in ("packing", "padding_free") if options.get(name)), None):
        check_packing(run, model, option)
    way, rewarded = WAYS[run.method], is_rewarded(run.method)
    more: dict[str, Any] = {"reward_funcs": [rewards.load(each) for each in run.reward]} if rewarded else {}
    shared = run.lora or bool(options.get("precompute_ref_log_probs"))
    if way.reference(options) and not rewarded and run.parallel == "fsdp2" and not shared:
        more["ref_model"] = loading.reference_of(run, options)
    if way.teacher:
        more["teacher_model"] = loading.teacher_of(run, options, arguments)
    if run.lora:
        more["peft_config"] = loading.adapter_config(options, model)
    save_only, arguments.save_only_model = (
        arguments.save_only_model,
        run.parallel == "tp" or arguments.save_only_model,
    )
    trainer = trainer_class(run, monitor, options["loraplus_lr_ratio"])(
        model=model,
        args=arguments,
        train_dataset=data.train,
        eval_dataset=data.evaluation,
        processing_class=tokenizer,
        callbacks=[callback],
        **more,
    )
    if run.parallel == "ddp" and devices.world_size() == 1:
        devices.be_alone()
    # Trainer refuses optimizers of models that were sharded on loading; `_save_optimizer…` saves them.
    arguments.save_only_model = save_only
    if run.lora and run.layout.tp > 1:
        loading.mend_adapter(trainer.model)
    if rewarded and run.layout.tp > 1:
        _seed_alike(run, arguments)
    trainer.remove_callback(PrinterCallback)  # the monitor has the numbers; so errors stay visible in the log
    callback.watch(trainer)
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


def _seed_alike(run: Run, arguments: Any) -> None:
    """Seed the tensor-parallel ranks of one replica equally: they compute one model, and must draw the same completion.

    TRL seeds each process differently, which is right only for ranks with different data.
    """
    from transformers import set_seed

    set_seed(arguments.seed + devices.rank() // run.layout.tp)
