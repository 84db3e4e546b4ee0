"""Find weights below the folder that users name, where engines put them, and the config and tokenizer for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from reshard.folders.allowed_paths import folders_in
from reshard.folders.iterations import Iteration

WEIGHT_FOLDERS = tuple(
    re.compile(pattern)
    for pattern in (
        r"pytorch_model_fsdp_\d+",  # accelerate and Trainer, FSDP with SHARDED_STATE_DICT
        r"checkpoints?",  # torchtitan
        r"actor|policy|model|weights|model_weights|model_and_optim",  # verl; torchtitan; NeMo; OLMo-core
        r"dist_ckpt",  # verl with Megatron
        r"items|model_params|default",  # MaxText; Orbax
    )
)
STEPS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?:global_)?step[_-]?(\d+)",  # DeepSpeed, torchtitan, verl
        r"checkpoint-(\d+)",  # Trainer
        r"(?:.*-)?step=(\d+)(?:-.*)?",  # NeMo
        r"epoch[_-](\d+)",
        r"(\d+)",  # InternEvo, Orbax
        r"(\d+)\.orbax-checkpoint-tmp(?:-\d+)?",  # Orbax, unfinished
    )
)
RUN_FOLDER = re.compile(r"v(\d+)-\d{8}-\d{6}")
"""The folder of an ms-swift run, in the output folder that all runs share."""
MAX_DEPTH = 3


def descend(
    path: Path, holds: Callable[[Path], bool], step: Iteration | None = None
) -> tuple[Path | None, bool]:
    """The folder at or below `path` for which `holds` is true, and whether `step` was found on the way to it.

    If there are several steps, the requested one is used, or else the last. The folder is None if none is found.
    """
    level = [(path, False)]
    for _ in range(MAX_DEPTH + 1):
        match = next((place for place in level if holds(place[0])), None)
        if match:
            return match
        below = []
        for folder, passed in level:
            for child, number in _children(folder):
                if passed or number is None or step in (None, number):
                    below.append((child, passed or number == step is not None))
        level = below
    return None, False


def _children(folder: Path) -> Iterator[tuple[Path, int | None]]:
    """Subfolders of `folder` that engines are known to make, the latest first, with their steps."""
    if not folder.is_dir():
        return
    children = folders_in(folder)
    for pattern in WEIGHT_FOLDERS:
        yield from ((child, None) for child in children if pattern.fullmatch(child.name))
    yield from ((child, None) for _, child in _latest_first(children, RUN_FOLDER))
    for pattern in STEPS:
        yield from ((child, number) for number, child in _latest_first(children, pattern))


def _latest_first(children: list[Path], pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """The folders whose names match a pattern, with the number in the name, the highest first."""
    numbered = [(int(match[1]), child) for child in children if (match := pattern.fullmatch(child.name))]
    return sorted(numbered, reverse=True)


def find_root(root: Path, typed: Path) -> Path:
    """The folder with config.json: `root` itself, one inside it, or one above it, up to the path that users pass.

    verl's Megatron workers save it in `huggingface/` beside `dist_ckpt/`, which users may pass.
    """
    folder = typed if typed.is_dir() and typed.name != "dist_ckpt" else typed.parent
    above = [place for place in root.parents if place == folder or folder in place.parents]
    inner = [place / "huggingface" for place in (root, *above)]
    linked = [place for place in inner if place.is_symlink()]  # these lead out of the checkpoint
    for place in [root, inner[0], *above, *inner[1:]]:
        if (place / "config.json").is_file() and place not in linked:
            return place
    return root
