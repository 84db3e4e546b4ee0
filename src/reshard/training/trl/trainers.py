"""The trainer of a run: TRL's, extended by `overrides.py`, with the models and the data that it needs."""

from __future__ import annotations

from typing import Any

from reshard.base.errors import ReshardError
from reshard.training import rewards
from reshard.training.methods import is_rewarded
from reshard.training.run import Run
from reshard.training.show.monitor import Metrics
from reshard.training.trl import devices, loading
from reshard.training.trl.methods import WAYS
from reshard.training.trl.overrides import Overrides
from reshard.training.trl.rows import Data


def trainer_class(run: Run, monitor: Metrics, loraplus: float | None = None) -> Any:
    """TRL's trainer of a method, extended by our mixin."""
    base = WAYS[run.method].trainer_class()
    own = {"asked": run, "monitor": monitor, "loraplus": loraplus}
    return type(base.__name__, (Overrides, base), own)


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
