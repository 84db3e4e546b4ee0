"""The available engines: packages with an `ENGINE`, imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from reshard.training.engine import Engine
from reshard.training.options import ENGINES
from reshard.training.run import Run

MODULES = {name: f"reshard.training.{name}" for name in ENGINES}
"""Engines by the names that users type."""


def engine_named(name: str) -> Engine:
    """The engine with a name of `MODULES`."""
    return cast(Engine, import_module(MODULES[name]).ENGINE)


def engine_of(run: Run) -> Engine:
    """The engine of a run."""
    return engine_named(run.engine)
