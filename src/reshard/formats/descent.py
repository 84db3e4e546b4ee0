"""Where engines put weights below the folder that people name, and where config and tokenizer then lie."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

KNOWN = tuple(
    re.compile(pattern)
    for pattern in (
        r"pytorch_model_fsdp_(\d+)",  # accelerate and Trainer, FSDP with SHARDED_STATE_DICT
        r"(?:global_)?step[_-]?(\d+)",  # DeepSpeed, torchtitan, verl
        r"checkpoint-(\d+)",  # Trainer
        r"checkpoints?",  # torchtitan
        r"epoch[_-](\d+)",
        r"actor|policy|model|weights",  # verl; torchtitan
        r"(\d+)",  # InternEvo
    )
)
DEPTH = 3


def descend(path: Path, holds: Callable[[Path], bool]) -> Path | None:
    """The folder at or below `path` for which `holds` is true; of several steps the last one. None if there is none."""
    level = [path]
    for _ in range(DEPTH + 1):
        found = next((place for place in level if holds(place)), None)
        if found:
            return found
        level = [child for place in level for child in _children(place)]
    return None


def _children(folder: Path) -> Iterator[Path]:
    """Folders below `folder` that engines are known to make, the latest first of each kind."""
    if not folder.is_dir():
        return
    children = sorted(child for child in folder.iterdir() if child.is_dir())
    for pattern in KNOWN:
        matches = [(child, match) for child in children if (match := pattern.fullmatch(child.name))]
        yield from (
            child for child, match in sorted(matches, key=lambda item: _number(item[1]), reverse=True)
        )


def _number(match: re.Match[str]) -> int:
    return int(match[1]) if match.re.groups and match[1] else 0


def find_root(root: Path, given: Path) -> Path:
    """The folder with config.json: `root` itself, one inside it, or one above it up to the path that was named."""
    folder = given if given.is_dir() else given.parent
    above = [place for place in root.parents if place == folder or folder in place.parents]
    for place in [root, root / "huggingface", *above, *(place / "huggingface" for place in above)]:
        if (place / "config.json").is_file():
            return place
    return root
