"""The types of GGUF's tensors.

Source: `gguf-py/gguf/constants.py` and `ggml/src/gguf.cpp` of llama.cpp, as of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple


class TensorType(NamedTuple):
    """How a tensor is stored: blocks of `elements` elements in `nbytes` bytes. `file_type` is what llama.cpp calls a
    file of such tensors (`LlamaFileType`).
    """

    name: str
    number: int
    elements: int
    nbytes: int
    file_type: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether its elements are numbers on their own."""
        return self.elements == 1

    def size(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor, whose rows consist of complete blocks."""
        return prod(shape) // self.elements * self.nbytes

    def divides(self, shape: tuple[int, ...]) -> bool:
        """Whether the rows of a tensor consist of complete blocks."""
        return not shape or shape[-1] % self.elements == 0


F32, F16, BF16 = (
    TensorType("F32", 0, 1, 4, 0),
    TensorType("F16", 1, 1, 2, 1),
    TensorType("BF16", 30, 1, 2, 32),
)
Q8_0, MXFP4 = TensorType("Q8_0", 8, 32, 34, 7), TensorType("MXFP4", 39, 32, 17, 38)
WRITABLE_TYPES = (
    F32,
    F16,
    BF16,
    Q8_0,
    TensorType("Q4_0", 2, 32, 18, 2),
    TensorType("Q4_1", 3, 32, 20, 3),
    TensorType("Q5_0", 6, 32, 22, 8),
    TensorType("Q5_1", 7, 32, 24, 9),
    TensorType("TQ1_0", 34, 256, 54, 36),
    TensorType("TQ2_0", 35, 256, 66, 37),
    MXFP4,
)
"""What `gguf.quants.quantize` computes."""
READABLE_TYPES = (
    *WRITABLE_TYPES,
    TensorType("Q2_K", 10, 256, 84),
    TensorType("Q3_K", 11, 256, 110),
    TensorType("Q4_K", 12, 256, 144),
    TensorType("Q5_K", 13, 256, 176),
    TensorType("Q6_K", 14, 256, 210),
    TensorType("IQ2_XXS", 16, 256, 66),
    TensorType("IQ2_XS", 17, 256, 74),
    TensorType("IQ3_XXS", 18, 256, 98),
    TensorType("IQ1_S", 19, 256, 50),
    TensorType("IQ4_NL", 20, 32, 18),
    TensorType("IQ3_S", 21, 256, 110),
    TensorType("IQ2_S", 22, 256, 82),
    TensorType("IQ4_XS", 23, 256, 136),
    TensorType("IQ1_M", 29, 256, 56),
    TensorType("NVFP4", 40, 64, 36),
)
"""What `gguf.quants.dequantize` computes."""
OTHER_TYPES = (
    TensorType("Q8_1", 9, 32, 40),
    TensorType("Q8_K", 15, 256, 292),
    TensorType("I8", 24, 1, 1),
    TensorType("I16", 25, 1, 2),
    TensorType("I32", 26, 1, 4),
    TensorType("I64", 27, 1, 8),
    TensorType("F64", 28, 1, 8),
    TensorType("Q1_0", 41, 128, 18),
)
TENSOR_TYPES = {kind.number: kind for kind in (*READABLE_TYPES, *OTHER_TYPES)}
"""All types of tensors, by number."""

QUANTIZED = tuple(kind.name.lower() for kind in WRITABLE_TYPES)
"""The values of `--quantize` for GGUF."""


def written(name: str) -> TensorType:
    """The type that a value of `--quantize` names."""
    return WRITABLE_TYPES[QUANTIZED.index(name)]
