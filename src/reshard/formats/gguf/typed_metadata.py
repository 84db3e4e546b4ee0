"""Collect metadata for a GGUF file: unknown and empty values are left out, as in llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reshard.formats.gguf.value_types import Value, ValueType

INTEGERS = {ValueType.UINT32: range(1 << 32), ValueType.INT32: range(-(1 << 31), 1 << 31)}

MAX_FLOAT32 = float.fromhex("0x1.fffffep127")
"""The largest number in float32."""


def _checked(key: str, kind: ValueType, value: Any) -> Any:
    """A value as its type stores it. Raises TypeError or ValueError if it is none of that type."""
    if kind is ValueType.FLOAT32 and abs(float(value)) <= MAX_FLOAT32:
        return float(value)
    if (
        kind in INTEGERS
        and type(value) in (int, float)
        and value == int(value)
        and int(value) in INTEGERS[kind]
    ):
        return int(value)
    if isinstance(value, {ValueType.BOOL: bool, ValueType.STRING: str | bytes}.get(kind, ())):
        return value
    raise TypeError(f"{key} cannot be {value!r:.100}")


class TypedMetadata:
    """Typed metadata in the order in which they are set. A key that is set again keeps its place."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}

    def set(self, key: str, kind: ValueType, value: Any) -> None:
        """Set one value, unless it is None or an empty text."""
        if value is None or (kind is ValueType.STRING and not value):
            return
        self.values[key] = Value(kind, _checked(key, kind, value))

    def text(self, key: str, value: str | None) -> None:
        self.set(key, ValueType.STRING, value)

    def array(self, key: str, item: ValueType, values: Sequence[Any] | None) -> None:
        """Set a list, unless it is empty."""
        if values:
            self.values[key] = Value(ValueType.ARRAY, [_checked(key, item, each) for each in values], item)
