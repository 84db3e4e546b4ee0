"""Norms that an engine stores minus one: sources whose elements are those of a tensor plus a number.

Megatron-Core computes with `1 + weight` if `apply_layernorm_1p` is set; if the Hub's model computes with the weight
itself, the two differ by one. Sums are float64, which is exact for trained weights; only the stored result is rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reshard.algebra.dtypes import BY_NAME
from reshard.algebra.tensors import Computed, Read, Replica, Tensor
from reshard.algebra.views import View
from reshard.base.errors import ReshardError
from reshard.transfer.elements import as_float, castable

FLOAT64 = BY_NAME["float64"]


class Shifted(Computed):
    """Each element of `tensor` plus `by`, as float64."""

    dtype = FLOAT64

    def __init__(self, tensor: Tensor, by: float) -> None:
        self.inputs = (tensor,)
        self.by = by

    def room(self, count: int) -> int:
        return 40 * count  # three arrays of float64, the input, and its conversion to float64

    def values(self, begin: int, end: int, read: Read) -> np.ndarray[Any, Any]:
        (tensor,) = self.inputs
        found = as_float(read(tensor, begin, end), tensor.dtype).astype(np.float64)
        raw: np.ndarray[Any, Any] = (found + self.by).view(np.uint64)
        return raw


def shifted(name: str, tensor: Tensor, by: float) -> View:
    """A tensor plus `by`; if the opposite was already added, the original is returned.

    Raises ReshardError for a dtype that does not support addition.
    """
    sources = [piece.source for piece in tensor.view.pieces]
    if any(isinstance(source, Shifted) and source.by == -by for source in sources):
        return tensor.view.through(lambda source: source.inputs[0].view)  # type: ignore[attr-defined]
    if not castable(tensor.dtype):
        raise ReshardError(
            "norm-dtype-unsupported",
            "a norm is not stored in a type that can be added to",
            tensor=name,
            file=tensor.file,
            expected="bfloat16, float16, float32 or float64",
            found=str(tensor.dtype),
            remedy="store it in one of these, as its publisher does",
        )
    return View.of(Shifted(tensor, by), *tensor.shape)


def rounding(name: str, tensor: Tensor, by: float) -> Replica | None:
    """The comparison that fails if a tensor plus `by` cannot be stored in its own dtype without loss.

    None if nothing is added, because it was subtracted before.
    """
    view = shifted(name, tensor, by)
    if not any(isinstance(piece.source, Shifted) and piece.source.by == by for piece in view.pieces):
        return None
    back = View.of(Shifted(Tensor(tensor.dtype, view), -by), *tensor.shape)
    return Replica(
        name,
        tensor,
        Tensor(tensor.dtype, back),
        f"the Hub and Megatron-Core store this norm with an offset of one, and {tensor.dtype} represents both exactly",
        f"pass --dtype float32 to keep every value, or --dtype {tensor.dtype} to round them",
        "norm-not-exact",
        f"a norm cannot be stored {'plus' if by > 0 else 'less'} one without rounding",
    )
