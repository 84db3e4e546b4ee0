"""Metadata while they are collected: unknown and empty values are left out, as in llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reshard.formats.gguf.values import Type, Value


class Keys:
    """Typed metadata in the order in which they are set. A key that is set again keeps its place."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}

    def set(self, key: str, kind: Type, value: Any) -> None:
        """Set one value, unless it is None or an empty text."""
        if value is None or (kind is Type.STRING and not value):
            return
        self.values[key] = Value(kind, float(value) if kind is Type.FLOAT32 else value)

    def text(self, key: str, value: str | None) -> None:
        self.set(key, Type.STRING, value)

    def array(self, key: str, item: Type, values: Sequence[Any] | None) -> None:
        """Set a list, unless it is empty."""
        if values:
            self.values[key] = Value(Type.ARRAY, list(values), item)
