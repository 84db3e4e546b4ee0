"""Which tool wrote a safetensors file, by the `format` in its metadata."""

from __future__ import annotations

from pathlib import Path

from reshard.base.errors import ReshardError
from reshard.stores import open_file

HEADER_BYTES = 1 << 12


def may_have(path: Path, *formats: str) -> bool:
    """Whether `path` has one of these formats (`has`), or cannot be read now: who opens it says what is wrong."""
    try:
        return has(path, *formats)
    except (OSError, ReshardError):
        return True


def has(path: Path, *formats: str) -> bool:
    """Whether `path` is a folder whose weights have one of these formats, or one such file, or the index of several.

    Raises OSError or ReshardError if it cannot be read.
    """
    if path.is_file() and path.name.endswith(".safetensors.index.json"):
        path = path.parent
    files = [path] if path.is_file() else sorted(path.glob("model*.safetensors"))
    if not files or files[0].suffix != ".safetensors":
        return False
    with open_file(files[0]) as opened:
        begin = opened.read(0, min(HEADER_BYTES, opened.size)).replace(b" ", b"")
    return any(b'"format":"%s"' % each.encode() in begin for each in formats)
