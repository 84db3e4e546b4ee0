"""Which files a checkpoint may refer to: names in a checkpoint must not lead out of its folder.

The path that a user passes may be a link to anywhere. Files that a checkpoint names (the shards of an index, the chunks
of `.metadata`) must be below it. Links to weights are followed, wherever they lead: people put shards on other disks,
and the file is either read as weights or refused. Links to companions are not followed, because companions are copied
unchanged, and in an untrusted archive `x.model` could link to a private key of the user who unpacks it. They are
followed only to the folder with the weights of the same checkpoint, under the same name, and to the blobs of the Hub's
cache.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path

from reshard.base.errors import ReshardError
from reshard.containers import safetensors
from reshard.stores import is_remote, realpath
from reshard.transfer.source_files import Sources


def folders_in(path: Path) -> list[Path]:
    """The folders in `path` that can be listed. What others keep from us, like `lost+found` of a disk, is not ours."""
    return sorted(child for child in path.iterdir() if child.is_dir() and can_list(child))


def files_matching(pattern: Path) -> list[Path]:
    """Files whose names match the last part of a path. `Path.glob` hides that a folder cannot be listed."""
    if not pattern.parent.is_dir():
        return []
    return sorted(path for path in pattern.parent.iterdir() if fnmatchcase(path.name, pattern.name))


def can_list(folder: Path) -> bool:
    """Whether the files of a folder can be listed and opened."""
    return is_remote(folder) or os.access(folder, os.R_OK | os.X_OK)


def check_open(path: Path) -> None:
    """Raise ReshardError for a folder whose files can be listed but not opened, or opened but not listed."""
    if not path.is_dir() or can_list(path):
        return
    lacking = [what for what, flag in (("read", os.R_OK), ("search", os.X_OK)) if not os.access(path, flag)]
    raise ReshardError(
        "folder-closed",
        "no permission to read the folder",
        file=str(path),
        expected="permission to read and to search it",
        found=f"no permission to {' or to '.join(lacking)} it",
        remedy="ask its owner for permission (chmod u+rx, g+rx or o+rx), and run the same command again",
    )


def is_here(name: str, file: str = "") -> bool:
    """Whether the path `name`, which may be of another machine, exists, or contains `file`."""
    try:
        return (Path(name) / file).exists()
    except (OSError, ValueError):  # not a valid name on this file system
        return False


def belongs(path: Path, folder: Path, sources: Sources) -> bool:
    """Whether the file `path` of `folder` is part of that folder, and not a link out of it."""
    real, home = realpath(path), realpath(folder)
    if home in real.parents:
        return True
    repository = next((parent.parent for parent in home.parents if parent.name == "snapshots"), None)
    if repository and real.parent == repository / "blobs":
        return True
    if real.name != path.name and real.parent.name != "blobs":
        return False
    links = (link for link in folder.glob("*.safetensors") if link.is_symlink())
    return any(realpath(link).parent == real.parent and _is_weights(link, sources) for link in links)


def _is_weights(file: Path, sources: Sources) -> bool:
    try:
        safetensors.read_header(file, sources)
    except (OSError, ReshardError):
        return False
    return True
