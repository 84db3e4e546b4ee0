"""JSON that others wrote, read as plain data in bounded time and memory: a nest that is deep enough ends its parser."""

from __future__ import annotations

import json
from typing import Any

JSON_MOST = 128 << 20
"""Bytes of a JSON file, at most: vocabularies and indices of the largest models have a third of it."""
JSON_WEIGHT = 12
"""Bytes of memory that a byte of a tokenizer's JSON becomes while it is read: its text, and objects."""


def json_of(content: bytes) -> Any:
    """The value that JSON describes. Raises ValueError."""
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def to_json(content: Any) -> bytes:
    """JSON as Hugging Face folders have it: two spaces, a newline at the end. What is no character is escaped."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")
