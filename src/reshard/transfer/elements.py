"""Elements as numpy arrays: as integers of the same width to move them, as floats to cast them."""

from __future__ import annotations

from typing import Any

import numpy as np

from reshard.algebra.dtypes import DType

RAW: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Dtypes for moving elements: integers of their width, whatever they mean."""

CAST = 20
"""Most bytes that `cast` needs for an element: float64 values cast to bfloat16."""


def cast(values: np.ndarray[Any, Any], source: DType, target: DType) -> np.ndarray[Any, Any]:
    """Convert raw elements of one float type to another, rounding to nearest even as torch does."""
    return _from_float(as_float(values, source), target)


FLOATS: dict[str, Any] = {"float16": np.float16, "float32": np.float32, "float64": np.float64}


def as_float(values: np.ndarray[Any, Any], source: DType) -> np.ndarray[Any, Any]:
    """Raw elements as a numpy float type that represents them exactly."""
    if source.name == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    floats: np.ndarray[Any, Any] = np.ascontiguousarray(values).view(FLOATS[source.name])
    return floats


def _from_float(values: np.ndarray[Any, Any], target: DType) -> np.ndarray[Any, Any]:
    with np.errstate(over="ignore"):  # an overflow becomes Inf, which the executor reports by name
        if target.name != "bfloat16":
            narrowed: np.ndarray[Any, Any] = values.astype(FLOATS[target.name])
            raw: np.ndarray[Any, Any] = narrowed.view(RAW[target.itemsize])
            return raw
        narrow: np.ndarray[Any, Any] = np.asarray(values, np.float32)
    bits = narrow.view(np.uint32)
    rounded = bits >> 16  # one array, changed in place: several would not fit in the cache of a core
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    halves: np.ndarray[Any, Any] = rounded.astype(np.uint16)
    is_nan = np.isnan(narrow)
    if is_nan.any():
        halves[is_nan] = (bits[is_nan] >> 16) | 0x40
    return halves


def castable(dtype: DType) -> bool:
    """Whether `cast` supports this type."""
    return dtype.name == "bfloat16" or dtype.name in FLOATS
