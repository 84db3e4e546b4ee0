"""One module for each format. What a path holds is detected, never asked for."""

from __future__ import annotations

from pathlib import Path

from reshard.checkpoint import Checkpoint
from reshard.errors import Problem, ReshardError
from reshard.formats import companions, huggingface, iterations, megatron, megatron_legacy

FORMATS = {module.NAME: module for module in (megatron, megatron_legacy, huggingface)}
"""By name, in the order in which they are looked for."""


def detect(path: Path) -> str | None:
    """The format of what lies at `path`, or None."""
    return next((name for name, module in FORMATS.items() if module.detect(path)), None)


def is_replaceable(path: Path) -> bool:
    """Whether the folder `path` is what reshard wrote, or one checkpoint from elsewhere.

    A run with several iterations is more than a conversion may replace, and so is a folder with folders of
    other things, in which a file of weights happens to lie.
    """
    steps = iterations.found_in(path).values()
    if len(steps) > 1:
        return False
    if (path / "reshard.json").is_file():
        return True
    others = {child.name for child in path.iterdir() if child.is_dir() and child not in steps}
    return detect(path) is not None and others <= {companions.TEMPLATES}


def open_checkpoint(path: Path, iteration: int | None = None) -> Checkpoint:
    """Open a checkpoint of any format. Raises ReshardError if there is none, or if it is damaged."""
    if not path.exists():
        raise ReshardError("there is nothing at this path", file=str(path), remedy="check the path")
    name = detect(path)
    if name is None:
        found = sorted(child.name for child in path.iterdir())[:8] if path.is_dir() else [path.name]
        raise ReshardError(
            Problem(
                "no checkpoint found here",
                file=str(path),
                expected="a Hugging Face folder (*.safetensors), or a Megatron folder (iter_* or release)",
                found=", ".join(found) or "an empty folder",
                remedy="name the folder that holds the weights, or an iteration folder",
            )
        )
    if name == huggingface.NAME:
        if iteration is not None:
            raise ReshardError(
                "a Hugging Face folder has no iterations",
                file=str(path),
                found=f"--iteration {iteration}",
                remedy="leave out --iteration",
            )
        return huggingface.open_checkpoint(path)
    folder, _ = iterations.choose(path, iteration)  # a run may have changed its format on the way
    if megatron_legacy.detect(folder) and not megatron.detect(folder):
        return megatron_legacy.open_checkpoint(path, iteration)
    return megatron.open_checkpoint(path, iteration)
