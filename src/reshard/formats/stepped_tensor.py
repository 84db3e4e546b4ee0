"""Tensors whose elements one side stores changed, such as norms plus one: a rule declares the `Step` between both.

Megatron-Core computes with `1 + weight` if `apply_layernorm_1p` is set; if the Hub's model computes with the weight
itself, the two differ by one. Sums are float64, which is exact for trained weights; only the stored result is rounded
(llama.cpp's converter adds in the dtype of the weights, and its sums are rounded in it).
Products and quotients are float32, as MaxText computes them, with a factor that is float32, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reshard.algebra.dtypes import BY_NAME, castable
from reshard.algebra.tensors import Computed, InputReader, Replica, Tensor
from reshard.algebra.views import View
from reshard.base.errors import ReshardError
from reshard.families.rules import ReversibleStep, Step
from reshard.transfer.elements import as_float

FLOAT32, FLOAT64 = BY_NAME["float32"], BY_NAME["float64"]


class SteppedTensor(Computed):
    """Each element of `tensor` after `step`, as float64 if that is a sum, else as float32."""

    def __init__(self, tensor: Tensor, step: Step) -> None:
        self.inputs = (tensor,)
        self.step = step
        self.dtype = FLOAT64 if step.plus else FLOAT32

    def memory_for(self, count: int) -> int:
        return 40 * count  # three arrays of float64, the input, and its conversion to float64

    def values(self, begin: int, end: int, read: InputReader) -> np.ndarray[Any, Any]:
        (tensor,) = self.inputs
        stored = as_float(read(tensor, begin, end), tensor.dtype)
        raw: np.ndarray[Any, Any]
        if self.step.plus:
            kind: np.dtype[Any] = np.dtype(np.float64)
            if self.step.in_torch:
                kind = stored.dtype if stored.dtype == np.float16 else np.dtype(np.float32)
            total = stored.astype(kind) + kind.type(self.step.plus)
            raw = total.astype(np.float64).view(np.uint64)
            return raw
        with np.errstate(over="ignore", invalid="ignore"):  # reported by name as NaN or Inf
            raw = stored.astype(np.float32) * np.float32(self.step.times) / np.float32(self.step.over)
        return raw.view(np.uint32)


def changed(name: str, tensor: Tensor, change: ReversibleStep) -> View:
    """A tensor after a change; if its elements are the result of the opposite, the original is returned.

    Raises ReshardError for a dtype that does not support arithmetic.
    """
    sources = [piece.source for piece in tensor.view.pieces]
    if all(isinstance(source, SteppedTensor) and source.step == change.back for source in sources):
        return tensor.view.through(lambda source: source.inputs[0].view)  # type: ignore[attr-defined]
    if not castable(tensor.dtype):
        raise ReshardError(
            "norm-dtype-unsupported",
            "a tensor is not stored in a type that can be computed with",
            tensor=name,
            file=tensor.file,
            expected="bfloat16, float16, float32 or float64",
            found=str(tensor.dtype),
            remedy="store it in one of these, as its publisher does",
        )
    return View.of(SteppedTensor(tensor, change.step), *tensor.shape)


def rounding(name: str, tensor: Tensor, change: ReversibleStep) -> Replica | None:
    """The comparison that fails if a tensor plus a number cannot be stored in its own dtype without loss.

    None if nothing is added, because it was subtracted before.
    """
    view = changed(name, tensor, change)
    if not any(
        isinstance(piece.source, SteppedTensor) and piece.source.step == change.step for piece in view.pieces
    ):
        return None
    back = View.of(SteppedTensor(Tensor(tensor.dtype, view), change.back), *tensor.shape)
    return Replica(
        name,
        tensor,
        Tensor(tensor.dtype, back),
        f"the Hub and Megatron-Core store this norm with an offset of one, and {tensor.dtype} represents both exactly",
        f"pass --dtype float32 to keep every value, or --dtype {tensor.dtype} to round them",
        "norm-not-exact",
        f"a norm cannot be stored {'plus' if change.step.plus > 0 else 'less'} one without rounding",
    )
