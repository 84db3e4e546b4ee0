"""The dtype of the final folder: that of the base, although weights are trained in float32 by default."""

from __future__ import annotations

from reshard.base.errors import ReshardError
from reshard.training.engines import engine_of
from reshard.training.run import Run

HALVES = ({"bfloat16"}, {"float16"})


def final_dtype(run: Run) -> str | None:
    """The dtype to which `final` rounds the trained weights; None to keep them as they were trained.

    They are kept if an option sets the dtype of training, if they are in the dtype of the base, or if the base has
    several dtypes. An adapter is kept too.
    """
    engine = engine_of(run)
    if run.lora or run.options.keys() & set(engine.dtypes) or engine.precision(run).weights != 4:
        return None
    from reshard.formats import open_checkpoint  # with all formats

    try:
        found = {tensor.dtype.name for tensor in open_checkpoint(run.model).tensors.values()}
    except ReshardError:  # the base was removed after the run began
        return None
    return found.pop() if found in HALVES else None
