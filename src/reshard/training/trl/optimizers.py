"""Optimizer and schedule of a run, made for a single weight: values that they refuse, before any rank starts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from reshard.base.errors import Problem
from reshard.training.trl.packages import OF_TORCH

OF_OPTIMIZER = ("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon")
OF_SCHEDULE = ("lr_scheduler_type", "lr_scheduler_kwargs")
STEPS = 1_000_000
"""Steps of a schedule whose length is not known yet."""


def refused(typed: Mapping[str, Any], told: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of optimizer and schedule. `typed` are the options that were given, `told` are all options."""
    for what, names, make in (
        ("optimizer", OF_OPTIMIZER, _optimizer),
        ("schedule of the learning rate", OF_SCHEDULE, _schedule),
    ):
        given = [name for name in names if name in typed]
        if not given:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                make(told)
        except (ValueError, TypeError, KeyError) as error:
            yield Problem(
                "optimizer-options-refused",
                f"the {what} cannot be made with these options",
                rule=str(error).split("\n")[0],
                found=" ".join(f"--{name} {_value(typed[name])}" for name in given),
                remedy="correct these options",
            )


def _value(option: Any) -> Any:
    return getattr(option, "value", option)


def _optimizer(told: Mapping[str, Any]) -> None:
    """Others than torch's may need a GPU or the model."""
    from transformers import Trainer
    from transformers.training_args import OptimizerNames

    name = str(_value(told["optim"]))
    if name in OF_TORCH:
        given = SimpleNamespace(**{**told, "optim": OptimizerNames(name)})
        kind, arguments = Trainer.get_optimizer_cls_and_kwargs(given, None)
        kind(_weights(), **arguments)


def _schedule(told: Mapping[str, Any]) -> None:
    from torch.optim import SGD
    from transformers import get_scheduler

    steps = int(told["max_steps"])
    get_scheduler(
        _value(told["lr_scheduler_type"]),
        SGD(_weights(), lr=float(told["learning_rate"])),
        num_warmup_steps=1,
        num_training_steps=steps if steps > 0 else STEPS,
        scheduler_specific_kwargs=told["lr_scheduler_kwargs"],
    )


def _weights() -> list[Any]:
    from torch import zeros
    from torch.nn import Parameter

    return [Parameter(zeros(1))]
