"""Convert elements to and from GGUF's blocks with the package gguf, block by block.

Both directions are computed block by block, so that any range of elements takes little memory.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from reshard.algebra.dtypes import dtype
from reshard.algebra.tensors import Computed, InputReader, Tensor
from reshard.algebra.views import View
from reshard.base.errors import ReshardError
from reshard.base.missing_packages import install_command
from reshard.codecs.gguf_types import MXFP4, READABLE_TYPES, TensorType
from reshard.codecs.not_finite import not_finite

FLOAT32, UINT8 = dtype("float32"), dtype("uint8")
Array = np.ndarray[Any, Any]

STEP_ELEMENTS = 1 << 16
"""Elements computed at a time: their values fit in the cache of a core."""
BYTES_EACH = 48
"""Most bytes that the package takes for an element that it computes."""


@lru_cache(maxsize=1)
def gguf_package() -> Any:
    """The modules of the package gguf. Raises ReshardError if it is not installed, or has not all types."""
    try:
        from gguf import constants, quants
    except ImportError as error:
        raise _no_package(str(error)) from None
    known = constants.GGMLQuantizationType.__members__
    if lacking := [kind.name for kind in READABLE_TYPES if kind.name not in known]:
        raise _no_package(f"an older one, without {', '.join(lacking)}")
    return constants, quants


def _no_package(found: str) -> ReshardError:
    return ReshardError(
        "gguf-package-missing",
        "the package gguf is not installed, or too old",
        rule="it computes the blocks of quantized GGUF tensors",
        found=found,
        remedy=f"install it: {install_command('gguf')}",
    )


def _call(function: str, kind: TensorType, blocks: Array) -> Array:
    constants, quants = gguf_package()
    with np.errstate(all="ignore"):  # NaN and Inf are reported by name
        converted: Array = getattr(quants, function)(blocks, constants.GGMLQuantizationType[kind.name])
    return converted


class BlockBytes(Computed):
    """The bytes of a tensor in the blocks of `kind`."""

    dtype = UINT8

    def __init__(self, name: str, tensor: Tensor, kind: TensorType) -> None:
        self.inputs = (Tensor(FLOAT32, tensor.view),)
        self._name, self._kind = name, kind

    def memory_for(self, count: int) -> int:
        elements = (count // self._kind.nbytes + 2) * self._kind.elements
        return 4 * elements + 2 * count + min(elements, STEP_ELEMENTS) * BYTES_EACH

    def values(self, begin: int, end: int, read: InputReader) -> Array:
        size, wide = self._kind.nbytes, self._kind.elements
        first, last = begin // size, -(-end // size)
        raw = read(self.inputs[0], first * wide, last * wide).view(np.float32)
        out = np.empty((last - first) * size, np.uint8)
        for low in range(0, last - first, STEP_ELEMENTS // wide):
            high = min(low + STEP_ELEMENTS // wide, last - first)
            part = raw[low * wide : high * wide].reshape(1, -1)
            if not np.isfinite(part).all():
                raise not_finite(self._name, self.inputs[0], self._kind.name)
            out[low * size : high * size] = _call("quantize", self._kind, part).reshape(-1)
        return out[begin - first * size : end - first * size]


class BlockElements(Computed):
    """The elements of a tensor that is stored in the blocks of `kind`; its input has the bytes."""

    dtype = FLOAT32

    def __init__(self, stored: Tensor, kind: TensorType) -> None:
        self.inputs = (stored,)
        self._kind = kind

    def memory_for(self, count: int) -> int:
        blocks = count // self._kind.elements + 2
        elements = blocks * self._kind.elements
        return blocks * self._kind.nbytes + 4 * elements + min(elements, STEP_ELEMENTS) * BYTES_EACH

    def values(self, begin: int, end: int, read: InputReader) -> Array:
        size, wide = self._kind.nbytes, self._kind.elements
        first, last = begin // wide, -(-end // wide)
        raw = read(self.inputs[0], first * size, last * size)
        out = np.empty((last - first) * wide, np.float32)
        for low in range(0, last - first, STEP_ELEMENTS // wide):
            high = min(low + STEP_ELEMENTS // wide, last - first)
            part = raw[low * size : high * size].reshape(1, -1)
            out[low * wide : high * wide] = _call("dequantize", self._kind, part).reshape(-1)
        return out.view(np.uint32)[begin - first * wide : end - first * wide]


class RepackedMxfp4(Computed):
    """The bytes of MXFP4 blocks as GGUF stores them, of blocks and scales as gpt-oss stores them: no value changes.

    A block has its scale first. A byte has the elements i and i + 16, and in gpt-oss 2i and 2i + 1.
    """

    dtype = UINT8

    def __init__(self, packed: Tensor, scales: Tensor) -> None:
        self.inputs = (packed, scales)

    def memory_for(self, count: int) -> int:
        return (count // MXFP4.nbytes + 2) * 120

    def values(self, begin: int, end: int, read: InputReader) -> Array:
        size = MXFP4.nbytes
        first, last = begin // size, -(-end // size)
        packed = read(self.inputs[0], first * 16, last * 16).reshape(-1, 16)
        out = np.empty((last - first, size), np.uint8)
        out[:, 0] = read(self.inputs[1], first, last)
        codes = np.stack([packed & 0x0F, packed >> 4], axis=-1).reshape(-1, 32)
        out[:, 1:] = codes[:, :16] | codes[:, 16:] << 4
        return out.reshape(-1)[begin - first * size : end - first * size]


def repacked(view: View) -> View | None:
    """A view of MXFP4 weights in complete blocks as the bytes of GGUF's blocks; None if it is something else."""
    packed, scales = [], []
    for piece in view.pieces:
        stored = piece.source.mxfp4 if isinstance(piece.source, Computed) else None
        *outer, last = piece.axes or ((1, 1, 1),)
        starts = (piece.start, piece.at, *(step for axis in outer for step in axis[1:]), last[0])
        if stored is None or last[1:] != (1, 1) or any(number % 32 for number in starts):
            return None
        axes = tuple((n, s // 32, t // 32) for n, s, t in outer)
        inner = ((last[0] // 32, 1, 1),) if last[0] > 32 else ()
        whole = piece._replace(start=piece.start // 32, at=piece.at // 32, axes=(*axes, *inner))
        scales.append(whole._replace(source=stored[1]))
        bytes_of = tuple((n, 16 * s, 16 * t) for n, s, t in axes)
        packed.append(
            piece._replace(
                source=stored[0],
                start=whole.start * 16,
                at=whole.at * 16,
                axes=(*bytes_of, (last[0] // 2, 1, 1)),
            )
        )
    count = view.numel // 32
    below = [
        View((each,), tuple(pieces)).through(lambda tensor: tensor.view)  # type: ignore[attr-defined]
        for each, pieces in ((count * 16, packed), (count, scales))
    ]
    source = RepackedMxfp4(Tensor(UINT8, below[0]), Tensor(UINT8, below[1]))
    return View.of(source, *view.shape[:-1], view.shape[-1] // 32 * MXFP4.nbytes)
