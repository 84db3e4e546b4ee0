"""JSON that a tool leaves beside its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reshard.folders.allowed_paths import belongs
from reshard.folders.json_objects import read_object
from reshard.transfer.source_files import Sources


def object_beside(folder: Path, name: str, sources: Sources) -> dict[str, Any] | None:
    """The object in a file of a folder; None if there is no such file. Raises ReshardError if it cannot be read."""
    path = folder / name
    return read_object(path, sources) if path.is_file() and belongs(path, folder, sources) else None
