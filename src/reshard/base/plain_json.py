"""Read text and JSON of others as plain data in bounded time and memory; too deep nesting raises ValueError."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

JSON_MOST = 128 << 20
"""Most bytes of a JSON file: vocabularies and indices of the largest models take a third of it."""
MAX_CODE_BYTES = 4 << 20
"""Most bytes of a Python file that is read."""
JSON_WEIGHT = 12
"""Bytes of memory per byte of a tokenizer's JSON while it is read: its text, and objects."""


def decoded(raw: bytes) -> str:
    """Text from UTF-8, or else from GB18030 (which includes GBK); other bytes become replacement characters."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        with suppress(UnicodeDecodeError):
            return raw.decode("gb18030")
    return raw.decode("utf-8", "replace")


def json_of(content: bytes) -> Any:
    """The value of a JSON text. Raises ValueError."""
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


_KINDS = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}


def json_kind(value: Any) -> str:
    """What a value of JSON is, in the words of JSON."""
    return _KINDS.get(type(value), "a number")


def to_json(content: Any) -> bytes:
    """JSON as in Hugging Face folders: indented by two spaces, with a final newline. Lone surrogates are escaped."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


def put(path: Path, content: Any) -> None:
    """Write JSON atomically."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False, default=str), encoding="utf-8")
    partial.replace(path)
