"""The checkpoint folders of a run: which are complete, and which are removed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from reshard.guard.end.completeness import RUN_RECORD, SAVED_FILE


def saved(output: Path) -> list[Path]:
    """The checkpoints that were saved completely, the latest last; older versions wrote no `SAVED_FILE`."""
    return [
        each
        for each in _checkpoints(output)
        if (each / RUN_RECORD).is_file()
        and any((each / name).is_file() for name in (SAVED_FILE, "trainer_state.json"))
    ]


def rotate(output: Path, limit: int | None, best: int | None = None) -> None:
    """Remove all checkpoints except the latest `limit`, and that of step `best`."""
    for old in _checkpoints(output)[:-limit] if limit else []:
        if old.name != f"checkpoint-{best}":
            shutil.rmtree(old)


def _checkpoints(output: Path) -> list[Path]:
    """The checkpoint folders, the latest last."""
    found = [each for each in output.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", each.name)]
    return sorted(found, key=lambda folder: int(folder.name.split("-")[1]))
