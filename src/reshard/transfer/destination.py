"""What may be replaced at a destination, and what must not be there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from reshard.base.errors import Problem, listed

DESTINATION_RULE = "the output is written next to the destination and replaces it once it is complete"
MAX_LINKS = 40
"""Most links followed in a chain: as many as Linux follows."""


def target_problems(
    sources: Sequence[Path], target: Path, *, foreign: Sequence[str] | None, single: bool = False
) -> list[Problem]:
    """Why writing to a destination would lose something, or why it is impossible.

    `sources` are all paths that are read, beginning with the one that the user named. `foreign` is None if a folder
    that is not empty must be kept. Otherwise it lists files that do not belong to the one checkpoint that may be
    replaced. If the output is a `single` file, the same applies to a file.
    """
    real = Path(os.path.realpath(target))  # for circular links, resolve() raises RuntimeError
    inside = [path for path in sources if _lies_in(path, real)] if real.exists() else []
    if inside:
        return [_holds_sources(sources[0], inside, target)]
    if real.is_dir() and any(real.iterdir()):
        if foreign is None:
            return [_not_empty(target, [path.name for path in target.iterdir()])]
        if foreign:
            return [_holds_more(target, foreign)]
        if _real(sources[0]) in real.parents and not (real / "reshard.json").is_file():
            return [_part_of_the_source(sources[0], target)]
    if real.is_symlink():  # still a link after all links were followed
        return [
            Problem(
                "destination-links-to-itself",
                "the destination is a link to itself",
                file=str(target),
                remedy="choose a folder",
            )
        ]
    if single and real.is_file():
        if foreign is None:
            return [_exists(target)]
        return [_holds_more(target, foreign)] if foreign else []
    if real.exists() and not real.is_dir():
        return [
            Problem(
                "destination-is-a-file",
                "the destination is a file",
                file=str(target),
                remedy="choose a folder",
            )
        ]
    if real.is_mount():
        return [
            Problem(
                "destination-is-a-mount-point",
                "the destination is a mount point",
                file=str(target),
                rule=DESTINATION_RULE,
                remedy=f"choose a folder in it: {target / sources[0].name}",
            )
        ]
    return _unwritable(_above(real))


def bucket_problems(
    sources: Sequence[Path], url: str, names: Sequence[str], *, foreign: Sequence[str] | None
) -> list[Problem]:
    """The same for a destination in a store that contains the objects `names`."""
    inside = [path for path in sources if f"{path}/".startswith(f"{url}/")]
    if inside:
        return [_holds_sources(sources[0], inside, url)]
    if names and foreign is None:
        return [_not_empty(url, names)]
    return [_holds_more(url, foreign)] if foreign else []


def space_problems(target: Path, needed: int) -> list[Problem]:
    """A problem if the disk of a destination has less than `needed` bytes free."""
    folder = _above(Path(os.path.realpath(target)))
    if not folder.is_dir() or (free := shutil.disk_usage(folder).free) >= needed:
        return []
    return [
        Problem(
            "disk-too-small",
            "not enough disk space for the output",
            file=str(folder),
            rule="disk space is checked before anything is written",
            expected=f"{needed:,} bytes free",
            found=f"{free:,} bytes free",
            remedy="free some space, or choose another disk or a narrower --dtype",
        )
    ]


def _above(target: Path) -> Path:
    """The nearest existing folder above a destination; the root, which has none, itself."""
    return next((path for path in target.parents if path.exists()), target)


def _real(path: Path) -> Path:
    """The target of a path. A link to itself is returned unchanged; `Path.resolve` raises an error."""
    return Path(os.path.realpath(path))


def _lies_in(path: Path, folder: Path) -> bool:
    """Whether a path, its target, or a link on the way is `folder` or inside it."""
    return any(place == folder or folder in place.parents for place in (_real(path), *_links(path)))


def _links(path: Path) -> Iterator[Path]:
    """Where a link is, and each link that it leads to."""
    for _ in range(MAX_LINKS):
        if not path.is_symlink():
            return
        path = path.parent.resolve() / path.name
        yield path
        path = path.parent / path.readlink()


def _holds_sources(source: Path, inside: Sequence[Path], target: Path | str) -> Problem:
    is_named = inside[0] == source
    if is_named and os.path.realpath(source) == os.path.realpath(target):
        return Problem(
            "source-is-destination",
            "the source and the destination are the same",
            file=str(target),
            rule="SRC is never modified",
            found=f"source {source}" if str(source) != str(target) else None,
            remedy="choose another destination",
        )
    return Problem(
        "source-in-destination" if is_named else "destination-contains-input",
        "the source is inside the destination"
        if is_named
        else "the destination contains files that the conversion reads",
        file=str(target),
        rule="--overwrite replaces the complete destination",
        found=f"source {source}" if is_named else listed([str(path) for path in inside]),
        remedy="choose a destination outside of the source",
    )


def _part_of_the_source(source: Path, target: Path) -> Problem:
    return Problem(
        "destination-in-source",
        "the destination is part of the source",
        file=str(target),
        rule="inside the source, only what reshard wrote is replaced",
        found=f"source {source}",
        remedy="choose another folder",
    )


def _not_empty(target: Path | str, names: Sequence[str]) -> Problem:
    return Problem(
        "destination-not-empty",
        "the destination is not empty",
        file=str(target),
        rule="old shards or a stale index must not remain next to new ones",
        found=listed(sorted(names), 5),
        remedy="choose another folder, or pass --overwrite to replace it",
    )


def _exists(target: Path) -> Problem:
    return Problem(
        "destination-exists",
        "the destination exists",
        file=str(target),
        remedy="choose another name, or pass --overwrite to replace it",
    )


def _holds_more(target: Path | str, foreign: Sequence[str]) -> Problem:
    return Problem(
        "destination-foreign-files",
        "the destination contains files that --overwrite does not delete",
        file=str(target),
        rule="--overwrite deletes what reshard wrote, or one checkpoint, and nothing else",
        expected="an empty folder, or one that contains only the checkpoint to replace",
        found=listed(foreign),
        remedy="move these files elsewhere, or choose another folder",
    )


def _unwritable(folder: Path) -> list[Problem]:
    """Why nothing can be created in a folder."""
    if not folder.is_dir():
        return [
            Problem(
                "destination-below-a-file",
                "the destination is below a file",
                file=str(folder),
                remedy="choose another folder",
            )
        ]
    if not os.access(folder, os.W_OK | os.X_OK):
        return [
            Problem(
                "destination-not-writable",
                "nothing can be written here",
                file=str(folder),
                rule=DESTINATION_RULE,
                remedy="choose a destination in one of your own folders, or ask for write permission",
            )
        ]
    return []
