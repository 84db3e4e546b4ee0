"""The dtype of the final folder: that of the base, though weights are trained in float32 where nothing else is said."""

from __future__ import annotations

from reshard.errors import ReshardError
from reshard.formats import open_checkpoint
from reshard.train.engines import engine_of
from reshard.train.run import Run

HALVES = ({"bfloat16"}, {"float16"})


def final_dtype(run: Run) -> str | None:
    """What the trained weights are rounded to in `final`; None if they stay as they were trained.

    They do where an option says in which dtype to train, where that is the base's, and where the base has several. An
    adapter stays as well.
    """
    engine = engine_of(run)
    if run.lora or run.options.keys() & set(engine.dtypes) or engine.precision(run).weights != 4:
        return None
    try:
        found = {tensor.dtype.name for tensor in open_checkpoint(run.model).tensors.values()}
    except ReshardError:  # it has gone since the run began
        return None
    return found.pop() if found in HALVES else None
