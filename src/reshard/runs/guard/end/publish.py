"""A checked folder gets its final name. What the user has put into the folder of an earlier end stays.

As with `convert --overwrite`, the user's own files are those that `reshard.json` does not list. Nothing of them is lost
if the process is killed in between: the next end of the run carries on with what it finds.
"""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path

from reshard.base.errors import ReshardError
from reshard.folders.companions import FILES_KEY, RECORD
from reshard.records.checkpoint_files import foreign_in
from reshard.records.reshard_json import digests_of, read_record

UNCHECKED_SUFFIX = ".unchecked"
"""Suffix of the name of a folder that has not been checked yet, and of one that is about to be removed."""
REPLACED_SUFFIX = ".replaced"
"""Suffix of the name of an earlier folder, until the user's files are in the new one."""
KEPT_SUFFIX = ".kept"
"""Suffix of the name of a user's file if the new folder has one of the same name."""


def publish(draft: Path, place: Path) -> list[str]:
    """Rename `draft` to `place`, and keep the user's files that are there. Returns their names in the new folder.

    If `place` already has the same files, it stays as it is.
    """
    aside = place.with_name(place.name + REPLACED_SUFFIX)
    kept = _settled(aside, place)
    if _is_same(place, draft):
        shutil.rmtree(draft)
        return kept
    if place.is_symlink() or place.is_file():  # reshard makes folders
        place.rename(_free(place))
    elif place.exists():
        place.rename(aside)
    draft.rename(place)
    return sorted({*kept, *_settled(aside, place)})


def _settled(aside: Path, place: Path) -> list[str]:
    """Finish the replacement of an earlier folder, now at `aside`. Returns the names of the user's files in `place`."""
    rubbish = aside.with_name(aside.name + UNCHECKED_SUFFIX)
    shutil.rmtree(rubbish, ignore_errors=True)
    if not aside.exists():
        return []
    if not place.exists():
        aside.rename(place)
        return []
    kept = [_moved(aside / name, place / name).relative_to(place) for name in _of_the_user(aside)]
    aside.rename(rubbish)  # at once, so that no half of it is ever taken for the user's
    shutil.rmtree(rubbish)
    return sorted(map(str, kept))


def _of_the_user(folder: Path) -> list[str]:
    """What is the user's own in a folder: all of it, if reshard did not write there."""
    return (
        foreign_in(folder) if (folder / RECORD).is_file() else sorted(each.name for each in folder.iterdir())
    )


def _moved(file: Path, target: Path) -> Path:
    """Where a file or folder of the user now lies: at `target`, or next to what is there."""
    free = _free(target) if target.exists() or target.is_symlink() else target
    free.parent.mkdir(parents=True, exist_ok=True)
    file.rename(free)
    return free


def _free(path: Path) -> Path:
    """A name next to a path, at which nothing lies."""
    names = (path.with_name(f"{path.name}{KEPT_SUFFIX}{number or ''}") for number in count())
    return next(each for each in names if not each.exists() and not each.is_symlink())


def _is_same(place: Path, draft: Path) -> bool:
    """Whether a folder has all files of another one, unchanged since reshard wrote them."""
    try:
        listed = read_record(place)[FILES_KEY]
        same = listed == read_record(draft)[FILES_KEY]
        return same and digests_of(place, list(listed), 1) == {
            name: told["digest"] for name, told in listed.items()
        }
    except ReshardError:
        return False
