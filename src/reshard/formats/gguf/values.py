"""The typed values of a GGUF file's metadata."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple


class Type(IntEnum):
    """The types of values, by their numbers in the file."""

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
    """A value; `item` is the type of the elements of an array."""

    type: Type
    value: Any
    item: Type | None = None
