"""The TRL engine: SFT, DPO and GRPO on transformers, TRL, accelerate and PEFT.

`fields.py` and `arithmetic.py` are asked before launch, `training.py` is what each rank runs. Importing this package
imports none of the frameworks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reshard.errors import Problem
from reshard.train.engine import Batches, Monitor, Option, Precision, Trained
from reshard.train.run import Run


def known_options(method: str) -> list[Option]:
    """Every option that the engine takes for a method: TRL's config of it, and what ModelConfig says of LoRA."""
    from reshard.train.trl.config_fields import known

    return known(method)


def options(run: Run) -> dict[str, Any]:
    """All options of a run, typed. Raises ReshardError naming every one that is unknown, mistyped or refused."""
    from reshard.train.trl.config_fields import options_of

    return options_of(run)


def batches(run: Run, world_size: int, samples: int) -> Batches:
    """The arithmetic of a run over so many ranks and samples. Raises ReshardError where it does not come out."""
    from reshard.train.trl.arithmetic import batches_of

    return batches_of(run, options(run), world_size, samples)


def evaluation(run: Run) -> str:
    """When a run with data to evaluate on is evaluated, in words."""
    from reshard.train.trl.arithmetic import evaluation_of

    return evaluation_of(options(run))


def precision(run: Run) -> Precision:
    """What a parameter weighs while it is trained."""
    from reshard.train.trl.arithmetic import precision_of

    return precision_of(run, options(run))


def train(run: Run, monitor: Monitor) -> Trained:
    """Load, assert the plan, train, save. Called on each rank, with the launcher's environment set."""
    from reshard.train.trl.training import train_here

    return train_here(run, monitor)


def check(run: Run, trained: Trained, final: Path) -> list[Problem]:
    """What differs between the weights in the folder `final` and those that were trained."""
    from reshard.train.trl.checking import differences

    return differences(run, trained, final)
