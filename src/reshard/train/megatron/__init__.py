"""Fine-tuning and continued pre-training on megatron-core, from a Hugging Face folder and back into one.

`options.py` lists what can be set, `weights.py` says what each rank holds, `load.py` reads it; `rows.py` and
`samples.py` make sequences of data; `setup.py`, `step.py`, `store.py`, `lora.py` and `proof.py` are the parts of
`loop.py`, which trains. Importing this package imports neither torch nor megatron-core.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from reshard.errors import Problem
from reshard.train.engine import Monitor, Trained
from reshard.train.megatron.batches import batches, precision
from reshard.train.megatron.options import known_options, read
from reshard.train.run import Run

__all__ = ["batches", "check", "evaluation", "known_options", "options", "precision", "train"]


_CHATTER: tuple[dict[str, Any], ...] = (
    {"module": r"megatron\.core"},
    {"message": r".*torch\.distributed\.\w+` is deprecated"},
    {"message": r"The \.grad attribute of a Tensor"},
)
"""Warnings about megatron-core's own code: each rank would repeat them before every run."""


def options(run: Run) -> dict[str, Any]:
    """The engine's options of a run, typed. Raises ReshardError naming all that are wrong."""
    return dict(vars(read(run)))


def evaluation(run: Run) -> str:
    """When a run with data to evaluate on is evaluated, in words."""
    found = read(run)
    often = f"every {found.eval_interval} steps" if found.eval_interval else "once an epoch"
    part = f", at most {found.eval_iters} steps' worth of sequences" if found.eval_iters else ""
    return f"{often} and after the last step{part}"


def train(run: Run, monitor: Monitor) -> Trained:
    """Load, assert the plan, train, save. Called on each rank, with the launcher's environment set."""
    for chatter in _CHATTER:
        warnings.filterwarnings("ignore", **chatter)
    from reshard.train.megatron import loop

    return loop.train(run, monitor)


def check(run: Run, trained: Trained, final: Path) -> list[Problem]:
    """What differs between the weights in the folder `final` and those that were trained, shard by shard."""
    from reshard.train.megatron.checking import check as compare

    return compare(run, trained, final)
