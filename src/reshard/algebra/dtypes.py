"""Element types: one row each, with the name in every program that reshard exchanges files with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """`name` is torch's (which has no 6-bit types), `safetensors` the header tag, `storage` torch's legacy class."""

    name: str
    itemsize: int
    safetensors: str
    storage: str | None
    nonfinite: int = 0
    """For floats: the smallest bit pattern, without the sign, of a NaN or Inf element; 0 if never needed."""
    bits: int | None = None
    """Bits of an element smaller than a byte. An item is then a byte, as in torch; safetensors counts elements."""

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)  # called several times for each tensor

    def elements(self, items: int) -> int:
        """How many elements this number of items contains."""
        return items * 8 // self.bits if self.bits else items

    def items(self, elements: int) -> int:
        """How many items contain this number of elements. Raises ValueError if they do not fill their bytes."""
        count, rest = divmod(elements * self.bits, 8) if self.bits else (elements, 0)
        if rest:
            raise ValueError(f"{elements} elements of {self.bits} bits do not fill their bytes")
        return count


_ALL = (
    DType("complex64", 8, "C64", "ComplexFloatStorage"),
    DType("float64", 8, "F64", "DoubleStorage", 0x7FF0_0000_0000_0000),
    DType("float32", 4, "F32", "FloatStorage", 0x7F80_0000),
    DType("bfloat16", 2, "BF16", "BFloat16Storage", 0x7F80),
    DType("float16", 2, "F16", "HalfStorage", 0x7C00),
    DType("float8_e4m3fn", 1, "F8_E4M3", None, 0x7F),
    DType("float8_e5m2", 1, "F8_E5M2", None, 0x7C),
    DType("float8_e4m3fnuz", 1, "F8_E4M3FNUZ", None),
    DType("float8_e5m2fnuz", 1, "F8_E5M2FNUZ", None),
    DType("float8_e8m0fnu", 1, "F8_E8M0", None),
    DType("float6_e2m3fn", 1, "F6_E2M3", None, bits=6),
    DType("float6_e3m2fn", 1, "F6_E3M2", None, bits=6),
    DType("float4_e2m1fn_x2", 1, "F4", None, bits=4),
    DType("int64", 8, "I64", "LongStorage"),
    DType("int32", 4, "I32", "IntStorage"),
    DType("int16", 2, "I16", "ShortStorage"),
    DType("int8", 1, "I8", "CharStorage"),
    DType("uint64", 8, "U64", None),
    DType("uint32", 4, "U32", None),
    DType("uint16", 2, "U16", None),
    DType("uint8", 1, "U8", "ByteStorage"),
    DType("bool", 1, "BOOL", "BoolStorage"),
)
BY_NAME = {dtype.name: dtype for dtype in _ALL if dtype.bits != 6}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in _ALL}
BY_STORAGE = {dtype.storage: dtype for dtype in _ALL if dtype.storage}
ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def dtype(name: str) -> DType:
    """The dtype called `name` ("bfloat16", "torch.bfloat16", "bf16"). Raises KeyError for an unknown name."""
    short = name.removeprefix("torch.")
    return BY_NAME[ALIASES.get(short, short)]


def of_most_bytes(sizes: Iterable[tuple[DType, int]]) -> DType:
    """The dtype with the most bytes, of dtypes of tensors with their bytes. Raises ValueError without any."""
    counted: Counter[DType] = Counter()
    for each, nbytes in sizes:
        counted[each] += nbytes
    return max(counted, key=counted.__getitem__)


def castable(dtype: DType) -> bool:
    """Whether elements of this type can be cast: it is a float of 16 bits or more."""
    return dtype.name in ("bfloat16", "float16", "float32", "float64")
