"""Suggestions for unknown names that users typed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

MIN_SIMILARITY = 0.6
"""The least similarity of a suggestion, from 0 to 1 (`difflib.SequenceMatcher.ratio`)."""


def closest(name: str, known: Iterable[str], *, most: int = 1, cutoff: float = MIN_SIMILARITY) -> list[str]:
    """At most `most` of the `known` names, the most similar first; none below `cutoff`.

    Ignores case and leading dashes, and treats dashes as underscores.
    """
    plain = {_normal(each): each for each in sorted(known)}
    return [plain[each] for each in get_close_matches(_normal(name), plain, most, cutoff)]


def meant(name: str, known: Iterable[str], elsewhere: Mapping[str, str] | None = None) -> str | None:
    """The known name to suggest, or None.

    `elsewhere` maps names in other programs to ours. An unambiguous beginning of a name is enough.
    """
    known = list(known)
    for theirs, ours in (elsewhere or {}).items():
        if _normal(theirs) == _normal(name) and ours.split()[0] in known:
            return ours
    begun = (
        [each for each in known if _normal(each).startswith(_normal(name))] if len(_normal(name)) > 2 else []
    )
    near = begun if len(begun) == 1 else closest(name, known)
    return near[0] if near else None


def did_you_mean(
    name: str, known: Iterable[str], otherwise: str, elsewhere: Mapping[str, str] | None = None
) -> str:
    """The remedy for an unknown name; `otherwise` is the remedy if no known name is similar."""
    near = meant(name, known, elsewhere)
    return f"did you mean {near}?" if near else otherwise


def similar_path(path: Path) -> Path | None:
    """The existing path with a name similar to the part of `path` that does not exist, and the same parts below it."""
    with suppress(OSError):  # a folder that may not be listed
        missing, *below = [each for each in (path, *path.parents) if not each.exists()][::-1] or [path]
        for name in closest(missing.name, (each.name for each in missing.parent.iterdir()), most=3):
            near = missing.with_name(name).joinpath(*(each.name for each in below))
            if near.exists():
                return near
    return None


def _normal(name: str) -> str:
    return name.lower().lstrip("-").replace("_", "-")
