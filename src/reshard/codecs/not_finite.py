"""The refusal of values that a scheme cannot store."""

from __future__ import annotations

from reshard.algebra.tensors import Tensor
from reshard.base.errors import ReshardError


def not_finite(name: str, weight: Tensor, kind: str) -> ReshardError:
    """The error for a weight that cannot be quantized, because `kind` has no codes for all of its values."""
    return ReshardError(
        "quantized-source-not-finite",
        "a weight contains NaN or Inf",
        tensor=name,
        file=weight.file,
        rule=f"{kind} cannot store NaN or Inf, which would become numbers",
        remedy="use an earlier iteration, or leave out --quantize",
    )
