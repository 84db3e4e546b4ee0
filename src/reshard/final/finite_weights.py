"""NaN and Inf in weights: of a base, and of what was made from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, listed, raise_all
from reshard.formats import open_checkpoint
from reshard.formats.checkpoint import Checkpoint
from reshard.transfer.elements import has_nonfinite
from reshard.transfer.gather import Gatherer
from reshard.transfer.thread_files import OpenFiles

WINDOW_ELEMENTS = 1 << 22
"""Elements that are read at a time."""
SAMPLE_BYTES = 1 << 28
"""Bytes that are read of a checkpoint before it is named: at most some seconds, however large it is. One step after a
loss is NaN, all weights that are trained are NaN, so the first elements of each tensor show it."""


def nonfinite(checkpoint: Checkpoint, most_bytes: int | None = None) -> Iterator[str]:
    """The names of tensors with NaN or Inf, in order. If `most_bytes`, only the first elements of each are read.

    Raises ReshardError or OSError if they cannot be read.
    """
    tensors = sorted(checkpoint.tensors.items())
    share = most_bytes // max(len(tensors), 1) if most_bytes else None
    with closing(OpenFiles()) as files:
        gatherer = Gatherer(files, None)
        for name, tensor in tensors:
            most = tensor.elements if share is None else share // tensor.dtype.itemsize
            if _is_nonfinite(gatherer, tensor, most):
                yield name


def _is_nonfinite(gatherer: Gatherer, tensor: Tensor, most: int) -> bool:
    """Whether one of the first elements is NaN or Inf."""
    end = min(most, tensor.elements) if tensor.dtype.nonfinite else 0
    windows = ((begin, min(begin + WINDOW_ELEMENTS, end)) for begin in range(0, end, WINDOW_ELEMENTS))
    return any(has_nonfinite(gatherer.read(tensor, *window), tensor.dtype) for window in windows)


def first_nonfinite(checkpoint: Checkpoint) -> str | None:
    """A tensor with NaN or Inf among the first elements of each; None if there is none."""
    return next(nonfinite(checkpoint, SAMPLE_BYTES), None)


def assert_finite(wrong: Sequence[str], folder: Path, base: Path | None) -> None:
    """Raise ReshardError if tensors that were written to `folder` are `wrong`, and say which were so in the base."""
    before = sorted(set(wrong) & set(nonfinite(open_checkpoint(base)))) if wrong and base else []
    blamed = [damaged(base, before)] if base and before else []
    raise_all([*blamed, *(_nonfinite(name, folder) for name in wrong if name not in before)])


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
