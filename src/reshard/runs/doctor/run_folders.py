"""The folder of a training run: its logs and configs, next to its checkpoints.

Trainer, ms-swift, LLaMA-Factory, verl, torchrun (`--log-dir`) and Slurm name these files differently.
A few patterns cover them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from reshard.runs.doctor.text.text_files import PROBED_BYTES, encoding_of

LOG_PATTERNS = ("*.log", "*.out", "*.err", "log*.txt", "*log.txt", "std*.txt")
CONFIG_PATTERNS = ("*.yaml", "*.yml", "ds*.json", "*deepspeed*.json", "zero*.json")
CHECKPOINT_PATTERNS = ("checkpoint-*", "iter_*", "global_step*", "epoch_*", "*.distcp", "huggingface")
ARGUMENT_FILES = ("args.json",)
"""The file in which ms-swift records its arguments."""
MAX_DEPTH = 4
"""Levels of folders that are searched: torchrun puts logs three levels below the given folder."""
MAX_LOGS = 500
"""Maximum number of logs that are read, the last written ones: a run of many ranks has one or two for each."""


def logs_in(folder: Path) -> list[Path]:
    """The logs of a run, the last written first; callers read at most `MAX_LOGS` of them."""
    logs = {path for place in _folders(folder) for path in _files(place, LOG_PATTERNS) if _is_text(path)}
    return sorted(logs, key=lambda path: path.stat().st_mtime, reverse=True)


def configs_in(folder: Path) -> list[Path]:
    """The configs in the folder itself, and in the subfolders that tools create for them."""
    places = [
        folder,
        *(folder / name for name in ("config", "configs", ".hydra") if (folder / name).is_dir()),
    ]
    return [path for place in places for path in _files(place, CONFIG_PATTERNS)]


def _folders(folder: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    yield folder
    if depth and os.access(folder, os.R_OK | os.X_OK):
        for child in sorted(folder.iterdir()):
            is_checkpoint = any(child.match(pattern) for pattern in CHECKPOINT_PATTERNS)
            if child.is_dir() and not child.is_symlink() and not is_checkpoint and child.name[:1] != ".":
                yield from _folders(child, depth - 1)


def _is_text(path: Path) -> bool:
    """Whether a file begins like a text, or cannot be read, which is reported later."""
    with suppress(OSError), path.open("rb") as file:
        return encoding_of(file.read(PROBED_BYTES)) is not None
    return True


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    files = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path for path in files if path.is_file() and path.stat().st_size)
