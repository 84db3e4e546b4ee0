"""NaN and Inf in the weights that a run starts from.

They are looked for once its loss is not finite, so that healthy runs do not read their base twice.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError, listed
from reshard.formats import open_checkpoint
from reshard.training.collective import everyone, place
from reshard.transfer.elements import count_nonfinite
from reshard.transfer.files import Files
from reshard.transfer.gather import Gatherer

WINDOW = 1 << 22
"""Elements that are read at a time."""


def assert_finite_base(model: Path) -> None:
    """Raise ReshardError if weights of the base are NaN or infinite. All ranks must call it; each reads a part."""
    rank, ranks = place()
    try:
        mine = nonfinite(model, rank, ranks)
    except (OSError, ReshardError):  # it was removed after the run began
        mine = []
    found = sorted(name for _, names in everyone(mine) for name in names)
    if found:
        raise ReshardError(damaged(model, found))


def damaged(model: Path, names: list[str]) -> Problem:
    """The problem of a base with such weights."""
    return Problem(
        "base-weights-not-finite",
        "weights of the base model are NaN or infinite",
        file=str(model),
        found=listed(names, 5),
        rule="they were so before the first step: neither the learning rate nor the data are the cause",
        remedy="copy or download the base again, or make it again: `reshard convert` names such tensors when it writes "
        "them",
    )


def nonfinite(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """The names of tensors with NaN or Inf, of one of several parts of a checkpoint. Raises ReshardError, OSError."""
    tensors = sorted(open_checkpoint(folder).tensors.items())[part::parts]
    with closing(Files()) as files:
        gatherer = Gatherer(files, None)
        return [name for name, tensor in tensors if _is_wrong(gatherer, tensor)]


def _is_wrong(gatherer: Gatherer, tensor: Tensor) -> bool:
    begins = range(0, tensor.elements, WINDOW) if tensor.dtype.nonfinite else ()
    sizes = ((begin, min(WINDOW, tensor.elements - begin)) for begin in begins)
    return any(count_nonfinite(gatherer.read(tensor, *each), tensor.dtype) for each in sizes)
