"""The model's config, which a tool leaves beside its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.folders.allowed_paths import belongs
from reshard.folders.companions import CONFIG, read_object
from reshard.transfer.source_files import Sources


def config_beside(folder: Path, sources: Sources) -> Mapping[str, Any]:
    """The content of config.json in a folder; empty if there is none. Raises ReshardError if it cannot be read."""
    path = folder / CONFIG
    return read_object(path, sources) if path.is_file() and belongs(path, folder, sources) else {}
