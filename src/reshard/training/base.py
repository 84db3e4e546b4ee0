"""NaN and Inf in the weights that a run starts from.

They are looked for once its loss is not finite, so that healthy runs do not read their base twice.
"""

from __future__ import annotations

from pathlib import Path

from reshard.base.errors import ReshardError
from reshard.training.collective import everyone, place


def assert_finite_base(model: Path) -> None:
    """Raise ReshardError if weights of the base are NaN or infinite. All ranks must call it; each reads a part."""
    from reshard.guard.finite import damaged, nonfinite  # with all formats, and only if a loss is not finite

    rank, ranks = place()
    try:
        mine = nonfinite(model, rank, ranks)
    except (OSError, ReshardError):  # it was removed after the run began
        mine = []
    found = sorted(name for _, names in everyone(mine) for name in names)
    if found:
        raise ReshardError(damaged(model, found))
