"""NaN and Inf in weights: of a base, and of what was made from it."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError, listed
from reshard.formats import open_checkpoint
from reshard.transfer.elements import count_nonfinite
from reshard.transfer.gather import Gatherer
from reshard.transfer.thread_files import OpenFiles

if TYPE_CHECKING:
    from reshard.commands.conversion import Conversion
    from reshard.formats.checkpoint import Checkpoint

WINDOW_ELEMENTS = 1 << 22
"""Elements that are read at a time."""
SAMPLE_BYTES = 1 << 28
"""Bytes that are read of a checkpoint before it is named: at most some seconds, however large it is. One step after a
loss is NaN, all weights that are trained are NaN, so the first elements of each tensor show it."""


def assert_finite(made: Conversion, folder: Path, base: Path | None) -> None:
    """Raise ReshardError if `convert` wrote NaN or Inf to `folder`, and say which of them the base had already."""
    wrong = made.report.nonfinite if made.report else []
    before = sorted(set(wrong) & set(nonfinite(base))) if wrong and base else []
    if wrong:
        blamed = [damaged(base, before)] if base and before else []
        raise ReshardError([*blamed, *(_nonfinite(name, folder) for name in wrong if name not in before)])


def _nonfinite(name: str, folder: Path) -> Problem:
    return Problem(
        "trained-weight-not-finite",
        "a weight is NaN or infinite",
        tensor=name,
        file=str(folder),
        remedy="convert an earlier checkpoint instead, and train with a lower learning rate",
    )


def damaged(model: Path, names: list[str]) -> Problem:
    """The problem of a base with such weights."""
    return Problem(
        "base-weights-not-finite",
        "weights of the base model are NaN or infinite",
        file=str(model),
        found=listed(names, 5),
        rule="they were already NaN before training started: neither the learning rate nor the data are the cause",
        remedy="copy or download the base again, or make it again: `reshard convert` names such tensors when it writes "
        "them",
    )


def damaged_base(model: Path) -> Problem | None:
    """The problem of a base in whose first weights NaN or Inf is found; None if none is, or it cannot be read."""
    with suppress(OSError, ReshardError):
        name = diverged(open_checkpoint(model))
        return damaged(model, [name]) if name else None
    return None


def nonfinite(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """The names of tensors with NaN or Inf, of one of several parts of a checkpoint. Raises ReshardError, OSError."""
    tensors = sorted(open_checkpoint(folder).tensors.items())[part::parts]
    with closing(OpenFiles()) as files:
        gatherer = Gatherer(files, None)
        return [name for name, tensor in tensors if _is_wrong(gatherer, tensor)]


def diverged(checkpoint: Checkpoint) -> str | None:
    """A tensor with NaN or Inf among the first elements of each, `SAMPLE_BYTES` bytes in all; None if there is none."""
    tensors = sorted(checkpoint.tensors.items())
    share = SAMPLE_BYTES // max(len(tensors), 1)
    with closing(OpenFiles()) as files:
        gatherer = Gatherer(files, None)
        wrong = (name for name, each in tensors if _is_wrong(gatherer, each, share // each.dtype.itemsize))
        return next(wrong, None)


def _is_wrong(gatherer: Gatherer, tensor: Tensor, most: int | None = None) -> bool:
    end = tensor.elements if most is None else min(most, tensor.elements)
    begins = range(0, end, WINDOW_ELEMENTS) if tensor.dtype.nonfinite else ()
    windows = ((begin, min(begin + WINDOW_ELEMENTS, end)) for begin in begins)
    return any(count_nonfinite(gatherer.read(tensor, *each), tensor.dtype) for each in windows)
