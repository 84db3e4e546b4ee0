"""Names of files in checkpoints, as paths."""

from __future__ import annotations

import reprlib
from pathlib import Path, PurePosixPath
from typing import Any

DCP_METADATA, ZARRAY = ".metadata", ".zarray"
MAX_NAME_BYTES = 255
"""Maximum length of a file name, in bytes."""


def path_below(folder: Path, name: Any) -> Path:
    """The path of `name`, as a checkpoint in `folder` calls it. Raises ValueError if it is not below that folder."""
    path = PurePosixPath(name) if isinstance(name, str) else PurePosixPath("/")
    names_file = path.name and all(
        len(part.encode(errors="replace")) <= MAX_NAME_BYTES for part in path.parts
    )
    if path.is_absolute() or ".." in path.parts or not names_file or "\0" in str(path):
        raise ValueError(f"{reprlib.repr(name)} is not below the folder of the checkpoint")
    return folder / path
