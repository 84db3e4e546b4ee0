"""The engines that there are: packages with an `ENGINE`, imported when it is needed. A further one is a line here."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from reshard.train.engine import Engine
from reshard.train.run import Run

MODULES = {"trl": "reshard.train.trl", "megatron": "reshard.train.megatron"}
"""By the names that users type."""


def engine_named(name: str) -> Engine:
    """The engine of a name of `MODULES`."""
    return cast(Engine, import_module(MODULES[name]).ENGINE)


def engine_of(run: Run) -> Engine:
    """The engine of a run."""
    return engine_named(run.engine)
