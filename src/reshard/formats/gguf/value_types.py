"""The values of GGUF's metadata.

Source: `gguf-py/gguf/constants.py` and `ggml/src/gguf.cpp` of llama.cpp, as of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple


class ValueType(IntEnum):
    """The type of a value (`GGUFValueType`)."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


class Value(NamedTuple):
    """One value: a number, a string, or a list of these, whose type is then `item`.

    A string is bytes if it is not UTF-8.
    """

    type: ValueType
    value: Any
    item: ValueType | None = None


Metadata = Mapping[str, Value]
