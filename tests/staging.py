"""Folders written next to their destination, for the tests of publishing, continuing and refusing."""

from __future__ import annotations

from pathlib import Path

from reshard.transfer.staging import staged

LEFT = "0123abcd"
"""Part of the names that a killed run leaves behind."""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def write(target: Path, *files: str, overwrite: bool = False) -> None:
    with staged(target, {file: len(file) for file in files}, overwrite=overwrite) as folder:
        for file in files:
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(file)
