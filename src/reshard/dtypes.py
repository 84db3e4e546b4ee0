"""Element types: one row for each, with its name in every world that reshard touches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """`name` is torch's, `safetensors` the header tag, `storage` the legacy torch storage class."""

    name: str
    itemsize: int
    safetensors: str
    storage: str | None
    exponent: int = 0
    """For floats: the mask of the exponent bits. An element whose exponent is all ones is NaN or Inf."""

    def __str__(self) -> str:
        return self.name


_ALL = (
    DType("float64", 8, "F64", "DoubleStorage", 0x7FF0_0000_0000_0000),
    DType("float32", 4, "F32", "FloatStorage", 0x7F80_0000),
    DType("bfloat16", 2, "BF16", "BFloat16Storage", 0x7F80),
    DType("float16", 2, "F16", "HalfStorage", 0x7C00),
    DType("float8_e4m3fn", 1, "F8_E4M3", None),
    DType("float8_e5m2", 1, "F8_E5M2", None),
    DType("int64", 8, "I64", "LongStorage"),
    DType("int32", 4, "I32", "IntStorage"),
    DType("int16", 2, "I16", "ShortStorage"),
    DType("int8", 1, "I8", "CharStorage"),
    DType("uint8", 1, "U8", "ByteStorage"),
    DType("bool", 1, "BOOL", "BoolStorage"),
)
BY_NAME = {dtype.name: dtype for dtype in _ALL}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in _ALL}
BY_STORAGE = {dtype.storage: dtype for dtype in _ALL if dtype.storage}
ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def dtype(name: str) -> DType:
    """The dtype called `name` ("bfloat16", "torch.bfloat16", "bf16"). Raises KeyError if there is none."""
    short = name.removeprefix("torch.")
    return BY_NAME[ALIASES.get(short, short)]
