"""Tell the files of the one checkpoint in a folder from other files, which are the user's own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from reshard.base.errors import ReshardError
from reshard.folders.companion_names import FILES_KEY, RECORD
from reshard.folders.companions import find_companions
from reshard.folders.json_objects import read_object
from reshard.formats import FORMATS, open_checkpoint
from reshard.stores import StorePath
from reshard.transfer.source_files import Sources

_NEVER_REPLACED = (
    *("README.md", "LICENSE*", ".gitattributes", "training_args.bin", "trainer_state.json", "progress.txt"),
    *("optimizer.pt", "optimizer_state.pt", "optimizer.bin", "scheduler.pt", "scheduler.bin", "scaler.pt"),
    *("rng_state*.pth", "random_states_*.pkl", "zero_to_fp32.py", "args.json"),
)
"""Files that the Hub and trainers write next to a model, and that no loader of weights reads: nothing replaces them."""

_DOWNLOADED = PurePosixPath(".cache/huggingface")
"""Download records of the Hub's client, in the folder that it downloaded to."""


def foreign_in(folder: Path) -> list[str]:
    """All files in `folder` that reshard did not write there, or that are not part of the one checkpoint there.

    Names are relative; a folder that contains only such files is listed once, with "/" at the end. If there are several
    iterations, all but one are foreign; if a checkpoint cannot be opened, everything is.
    """
    folder = folder.resolve()
    if isinstance(folder, StorePath):
        stored = (path for path in folder.rglob("*") if path.is_file())
        return foreign_among([path.relative_to(folder).as_posix() for path in stored], folder)
    own, patterns = _own_files(folder)
    kept = {parent for name in own for parent in name.parents}
    foreign = []
    for place, folders, files in os.walk(folder):
        here = PurePosixPath(Path(place).relative_to(folder).as_posix())
        links = [name for name in folders if Path(place, name).is_symlink()]
        for name in (*files, *links):
            if here / name not in own and not any(fnmatchcase(name, pattern) for pattern in patterns):
                foreign.append(str(here / name))
        inside = {name: here / name for name in folders if name not in links and here / name != _DOWNLOADED}
        folders[:] = [name for name, path in inside.items() if path in kept or path in _DOWNLOADED.parents]
        foreign += [f"{path}/" for name, path in inside.items() if name not in folders]
    return sorted(foreign)


def is_checkpoint(file: Path) -> bool:
    """Whether a file is a complete checkpoint, which another one may replace."""
    try:
        return not open_checkpoint(file).problems
    except ReshardError:
        return False


def stays(name: str) -> bool:
    """Whether a file next to a checkpoint stays there when the checkpoint is replaced; no folder does."""
    return not name.endswith("/") and any(
        fnmatchcase(PurePosixPath(name).name, pattern) for pattern in _NEVER_REPLACED
    )


def foreign_among(names: Iterable[str], folder: Path) -> list[str]:
    """The same for a folder in a store that contains the files `names`."""
    own, patterns = _own_files(folder)
    paths = map(PurePosixPath, names)
    return sorted(
        str(path)
        for path in paths
        if path not in own and not any(fnmatchcase(path.name, pattern) for pattern in patterns)
    )


def _own_files(folder: Path) -> tuple[set[PurePosixPath], tuple[str, ...]]:
    """The files of the checkpoint in a folder: paths, and patterns of names."""
    listed = _recorded_files(folder)
    return _of_the_checkpoint(folder) if listed is None else (listed, ())


def _recorded_files(folder: Path) -> set[PurePosixPath] | None:
    """The files that reshard wrote to a folder; None if it wrote none, or if an old version did not list them."""
    if not (folder / RECORD).is_file():
        return None
    try:
        files = read_object(folder / RECORD, Sources())[FILES_KEY]
        return {PurePosixPath(RECORD), *map(PurePosixPath, files)}
    except (ReshardError, KeyError, TypeError):
        return None


def _of_the_checkpoint(folder: Path) -> tuple[set[PurePosixPath], tuple[str, ...]]:
    """The files that are read to open the one checkpoint in a folder, its companions, and the parts of its format."""
    try:
        checkpoint = open_checkpoint(folder)
        read = map(Path, checkpoint.sources.paths)
        companions = find_companions(checkpoint.sources, folder, checkpoint.description.folder)
        paths = [*read, *companions.files.values(), folder / RECORD]
    except (ReshardError, OSError):
        return set(), ()
    below = (path.relative_to(folder) for path in paths if path.is_relative_to(folder))
    return {PurePosixPath(path.as_posix()) for path in below}, FORMATS[checkpoint.format].parts
