"""The folder of a run's checkpoints, before the run starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from reshard.base.errors import Problem, listed


def unwritable(output: Path, option: str) -> Iterator[Problem]:
    """Problems if the output cannot be created or written to."""
    place = next(path for path in (output, *output.parents) if path.exists())
    if place != output and not place.is_dir():
        yield Problem(
            "output-below-a-file",
            "the output folder cannot be created: a file has its name",
            file=str(place),
            found=f"{option} {output}",
            remedy=f"choose another folder with {option}",
        )
    elif place.is_dir() and not os.access(place, os.W_OK | os.X_OK):
        yield Problem(
            "output-not-writable",
            "the output cannot be written to",
            file=str(place),
            found="no permission to write",
            remedy=f"choose another folder with {option}, or change its permissions",
        )


CHECKPOINTS = (
    "checkpoint-*",
    "global_step*",
    "iter_*",
    "latest_checkpointed_iteration.txt",
    "v*-*/checkpoint-*",
)
"""What the checkpoints of the Trainer, DeepSpeed, verl, Megatron and ms-swift are called in a run's folder."""


def occupied(output: Path) -> Iterator[Problem]:
    """A warning if there are checkpoints in the output from which the run does not continue."""
    found = sorted(path.name for pattern in CHECKPOINTS for path in output.glob(pattern))
    if found:
        yield Problem(
            "output-has-checkpoints",
            "the output contains checkpoints of another run",
            file=str(output),
            rule="both runs then share one folder: new checkpoints replace old ones of the same step, and a limit on "
            "their number counts and deletes both",
            found=listed(found, 3),
            remedy="resume from them, or choose another folder",
            severity="warning",
        )
