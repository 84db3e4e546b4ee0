"""Where the files of a checkpoint may lie: what a checkpoint says itself leads to nothing outside of it.

The path that a user gives may be a link to anywhere. What the files of a checkpoint name (the shards of an index, the
chunks of `.metadata`) has to be below it. Links to weights are followed, wherever they lead: people lay shards on other
disks, and what such a link leads to is read as weights or not at all. Links to companions are not, because those are
copied as they are, and an archive from somewhere could have `x.model` point to a key of whoever unpacks it. They are
followed to where the weights of the same folder lie, under the same name, and to the blobs of the hub's cache.
"""

from __future__ import annotations

import reprlib
from pathlib import Path, PurePosixPath
from typing import Any

from reshard.errors import ReshardError
from reshard.formats import safetensors
from reshard.stores import realpath

LONGEST = 255
"""Bytes of the name of a file, at most."""


def below(folder: Path, name: Any) -> Path:
    """The file that a checkpoint in `folder` calls `name`. Raises ValueError for what is not below that folder."""
    path = PurePosixPath(name) if isinstance(name, str) else PurePosixPath("/")
    names_file = path.name and all(len(part.encode(errors="replace")) <= LONGEST for part in path.parts)
    if path.is_absolute() or ".." in path.parts or not names_file or "\0" in str(path):
        raise ValueError(f"{reprlib.repr(name)} is not below the folder of the checkpoint")
    return folder / path


def is_here(name: str, file: str = "") -> bool:
    """Whether what a file names, which may have been on another machine, is there, or has a `file` in it."""
    try:
        return (Path(name) / file).exists()
    except (OSError, ValueError):  # a name that no file system takes
        return False


def belongs(path: Path, folder: Path) -> bool:
    """Whether the file `path` of `folder` is a part of what lies there, and not a link to something else."""
    real, home = realpath(path), realpath(folder)
    if home in real.parents:
        return True
    repository = next((parent.parent for parent in home.parents if parent.name == "snapshots"), None)
    if repository and real.parent == repository / "blobs":
        return True
    if real.name != path.name and real.parent.name != "blobs":
        return False
    links = (link for link in folder.glob("*.safetensors") if link.is_symlink())
    return any(realpath(link).parent == real.parent and _is_weights(link) for link in links)


def _is_weights(file: Path) -> bool:
    try:
        safetensors.read_header(file)
    except (OSError, ReshardError):
        return False
    return True
