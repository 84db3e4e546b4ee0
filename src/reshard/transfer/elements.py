"""Elements as numpy arrays: as integers of the same width to move them, as floats to cast them.

A cast to a narrower dtype would make some finite values infinite, and the output useless: these are counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from reshard.algebra.dtypes import DType
from reshard.base.errors import Problem

RAW_DTYPES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Dtypes for moving elements: integers of their width, whatever they mean."""

CAST_BYTES_EACH = 20
"""Most bytes that `cast` needs for an element: float64 values cast to bfloat16."""


LARGEST_FINITE = {
    "float16": 65504.0,
    "bfloat16": (2 - 2.0**-7) * 2.0**127,
    "float32": (2 - 2.0**-23) * 2.0**127,
    "float64": (2 - 2.0**-52) * 2.0**1023,
}
"""The largest finite value of each dtype that can be cast to."""


class Overflow(NamedTuple):
    """Finite values that became infinite: how many, the largest magnitude, and the dtype that cannot hold it."""

    values: int
    largest: float
    dtype: str

    def joined(self, other: Overflow | None) -> Overflow:
        """Both together; the dtype is that of the largest value."""
        if other is None:
            return self
        worst = max(self, other, key=lambda each: each.largest)
        return worst._replace(values=self.values + other.values)


class Overflows:
    """What some casts have lost so far."""

    def __init__(self) -> None:
        self.overflow: Overflow | None = None

    def add(self, overflow: Overflow) -> None:
        """Add what one cast has lost."""
        self.overflow = overflow.joined(self.overflow)

    def of(self, nonfinite: int) -> Overflow | None:
        """What was lost in a result with this many elements that are not finite.

        A computed source may cast more elements than are needed of it, and some of them twice.
        """
        values = min(self.overflow.values, nonfinite) if self.overflow else 0
        return self.overflow._replace(values=values) if self.overflow and values else None


def overflow_problem(tensor: str, overflow: Overflow) -> Problem:
    """The error for values of a tensor that do not fit."""
    values, largest, dtype = overflow
    return Problem(
        "values-overflow",
        "finite values do not fit the dtype of the output, and would become infinite",
        tensor=tensor,
        rule="a conversion keeps every finite value finite",
        expected=f"at most {LARGEST_FINITE[dtype]:g}, the largest {dtype}",
        found=f"{values:,} value{'' if values == 1 else 's'} in the output, the largest of magnitude {largest:g}",
        remedy=_remedy(largest),
    )


def _remedy(largest: float) -> str:
    wider = [f"--dtype {name}" for name in ("bfloat16", "float32") if LARGEST_FINITE[name] >= largest]
    if not wider:
        return "keep float64: --to huggingface, without --dtype"
    return f"pass {' or '.join(wider)}, or leave out --dtype to keep that of the source"


def total(overflows: Iterable[tuple[str, Overflow]]) -> dict[str, Overflow]:
    """Overflows by tensor, of which each block has its own."""
    totals: dict[str, Overflow] = {}
    for name, overflow in overflows:
        totals[name] = overflow.joined(totals.get(name))
    return totals


def cast(values: np.ndarray[Any, Any], source: DType, target: DType, lost: Overflows) -> np.ndarray[Any, Any]:
    """Convert raw elements of one float type to another, rounding to nearest even as torch does.

    A finite value that does not fit becomes Inf, and is added to `lost`.
    """
    floats = as_float(values, source)
    raw, is_suspect = _from_float(floats, target)
    if is_suspect and LARGEST_FINITE[source.name] > LARGEST_FINITE[target.name]:
        is_lost = np.isfinite(floats) & ~np.isfinite(as_float(raw, target))
        if count := int(is_lost.sum()):
            lost.add(Overflow(count, float(np.where(is_lost, np.abs(floats), 0).max()), target.name))
    return raw


FLOAT_DTYPES: dict[str, Any] = {"float16": np.float16, "float32": np.float32, "float64": np.float64}


def as_float(values: np.ndarray[Any, Any], source: DType) -> np.ndarray[Any, Any]:
    """Raw elements as a numpy float type that represents them exactly."""
    if source.name == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    floats: np.ndarray[Any, Any] = np.ascontiguousarray(values).view(FLOAT_DTYPES[source.name])
    return floats


def has_nonfinite(raw: np.ndarray[Any, Any], dtype: DType) -> bool:
    """Whether an element is NaN or Inf.

    Read as integers, such elements are the largest: the positive ones if the bits are signed, the negative
    ones if they are not. Two maxima run at cache speed, where masks and comparisons would not.
    """
    if not dtype.nonfinite or not raw.size:
        return False
    bits, sign = raw.view(RAW_DTYPES[dtype.itemsize]), 1 << (8 * dtype.itemsize - 1)
    signed = bits.view(f"i{dtype.itemsize}")
    return bool(signed.max() >= dtype.nonfinite or bits.max() >= sign | dtype.nonfinite)


def count_nonfinite(raw: np.ndarray[Any, Any], dtype: DType) -> int:
    """How many elements are NaN or Inf."""
    bits, sign = raw.view(RAW_DTYPES[dtype.itemsize]), 1 << (8 * dtype.itemsize - 1)
    return int(np.count_nonzero((bits & (sign - 1)) >= dtype.nonfinite)) if dtype.nonfinite else 0


_ROUNDED_TO_INF = (2 - 2.0**-8) * 2.0**127
"""The least float32 that bfloat16 rounds to Inf."""


def _from_float(values: np.ndarray[Any, Any], target: DType) -> tuple[np.ndarray[Any, Any], bool]:
    """The rounded raw elements, and whether any of them is NaN or Inf if the target's range is the narrower one."""
    with np.errstate(over="ignore"):
        if target.name != "bfloat16":
            narrowed: np.ndarray[Any, Any] = values.astype(FLOAT_DTYPES[target.name])
            raw: np.ndarray[Any, Any] = narrowed.view(RAW_DTYPES[target.itemsize])
            return raw, target.itemsize < values.itemsize and has_nonfinite(raw, target)
        narrow: np.ndarray[Any, Any] = np.asarray(values, np.float32)
    bits = narrow.view(np.uint32)
    rounded = bits >> 16  # one array, changed in place: several would not fit in the cache of a core
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    halves: np.ndarray[Any, Any] = rounded.astype(np.uint16)
    # False for NaN, too: extremes propagate it. Together they cost hardly more than looking for NaN alone.
    is_usual = not narrow.size or (narrow.max() < _ROUNDED_TO_INF and narrow.min() > -_ROUNDED_TO_INF)
    if not is_usual:
        is_nan = np.isnan(narrow)
        halves[is_nan] = (bits[is_nan] >> 16) | 0x40
    return halves, not is_usual


def small_floats(
    exponent_bits: int, mantissa_bits: int, bias: int, special: str = ""
) -> np.ndarray[Any, Any]:
    """The float32 values of all codes of a signed float format; `special` tells which codes are NaN or Inf."""
    codes = np.arange(2 << (exponent_bits + mantissa_bits))
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = codes & ((1 << mantissa_bits) - 1)
    whole = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa).astype(np.float32)
    values = np.ldexp(whole, np.maximum(exponent, 1) - bias - mantissa_bits)
    values = np.where(codes >= len(codes) // 2, -values, values)
    if special == "fn":
        values[[0x7F, 0xFF]] = np.nan
    elif special == "fnuz":
        values[0x80] = np.nan
    elif special == "ieee":
        top = exponent == (1 << exponent_bits) - 1
        values[top] = np.where(mantissa[top], np.nan, np.copysign(np.inf, values[top]))
    floats: np.ndarray[Any, Any] = values.astype(np.float32)
    return floats
