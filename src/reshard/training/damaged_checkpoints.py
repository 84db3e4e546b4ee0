"""Reading the checkpoint from which a run continues: if its files are damaged, the one before is named."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reshard.base.errors import ReshardError
from reshard.guard.end.completeness import lacking
from reshard.training.engine_registry import engine_of
from reshard.training.run import Run

DAMAGE_ERRORS = (EOFError, OSError, pickle.UnpicklingError, json.JSONDecodeError, UnicodeDecodeError)
DAMAGE_WORDS = (
    *("PytorchStreamReader", "unexpected pos", "wrong byte size", "Invalid magic number"),
    *("metadata read failed", "SafetensorError"),
)
"""What torch's RuntimeErrors and the errors of safetensors say about damaged files."""


@contextmanager
def reading(run: Run, checkpoint: Path | None) -> Iterator[None]:
    """Raise ReshardError if files of the checkpoint turn out to be damaged while the block reads them."""
    try:
        yield
    except BaseException as error:  # of torch's distributed checkpoint, CheckpointException is no Exception
        if checkpoint is None or not _is_damage(error):
            raise
        raise ReshardError(
            "checkpoint-not-loadable",
            "the checkpoint cannot be loaded",
            file=str(checkpoint),
            found=_told(error),
            remedy=_way_on(run, checkpoint),
        ) from error


def _is_damage(error: BaseException) -> bool:
    """Whether an error says that a file is damaged, and not that something else is wrong, such as too little memory."""
    parts = _parts(error)
    if parts:
        return any(map(_is_damage, parts))
    if isinstance(error, ConnectionError):  # another rank has ended
        return False
    words = f"{type(error).__name__}: {error}"
    return isinstance(error, DAMAGE_ERRORS) or any(each in words for each in DAMAGE_WORDS)


def _parts(error: BaseException) -> list[BaseException]:
    """The errors of single ranks in one of torch's distributed checkpoint."""
    return [each for each, _ in getattr(error, "failures", {}).values()]


def _told(error: BaseException) -> str:
    first = next(iter(_parts(error)), error)
    return f"{type(first).__name__}: {first}".split("\n")[0]


def _way_on(run: Run, checkpoint: Path) -> str:
    """What to do, with the checkpoint before, if there is one."""
    all_saved = engine_of(run).checkpoints.saved(run.output)
    earlier = [each for each in all_saved[: all_saved.index(checkpoint)] if not lacking(each)]
    if not earlier:
        return "restore it from a copy; no checkpoint before it is complete, so --overwrite starts again"
    return f"restore it from a copy, or remove it: --resume then continues from {earlier[-1]}"
