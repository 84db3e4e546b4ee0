"""The available engines: packages with an `ENGINE`, imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from reshard.base.errors import ReshardError
from reshard.training.engine import Engine
from reshard.training.options import ENGINE_NAMES
from reshard.training.run import Run

ENGINE_MODULES = {name: f"reshard.training.{name}" for name in ENGINE_NAMES}
"""Engines by the names that users type."""


def engine_named(name: str) -> Engine:
    """The engine with a name of `ENGINE_MODULES`."""
    return cast(Engine, import_module(ENGINE_MODULES[name]).ENGINE)


def engine_of(run: Run) -> Engine:
    """The engine of a run."""
    return engine_named(run.engine)


def final_dtype(run: Run) -> str | None:
    """The dtype to which `final` rounds the trained weights; None to keep them as they were trained.

    Weights are trained in float32 by default, and rounded to the dtype of the base. They are kept if an option sets the
    dtype of training, if they are in the dtype of the base, or if the base has several dtypes. An adapter is kept too.
    """
    engine = engine_of(run)
    if run.lora or run.options.keys() & set(engine.dtypes) or engine.precision(run).weights != 4:
        return None
    from reshard.formats import open_checkpoint  # with all formats

    try:
        found = {tensor.dtype.name for tensor in open_checkpoint(run.model).tensors.values()}
    except ReshardError:  # the base was removed after the run began
        return None
    return found.pop() if found in ({"bfloat16"}, {"float16"}) else None
