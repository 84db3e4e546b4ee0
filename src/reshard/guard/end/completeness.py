"""Notes the files of a checkpoint when it is saved, so that no run continues from one that has lost some.

Frameworks skip files that are missing: without the optimizer's, training would continue with other losses.
"""

from __future__ import annotations

from pathlib import Path

from reshard.base.plain_json import json_of, put

SAVED_FILE = "saved.json"
"""The names and sizes of all other files of a checkpoint, except its record."""
RUN_RECORD = "run.json"
"""The record of a run of `reshard train`, in its output and in each of its checkpoints."""
TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".yaml", ".md", ".py", ".model")
"""Suffixes of files that users may edit."""


def note_files(folder: Path) -> None:
    """Write the names and sizes of the files in a checkpoint that is otherwise complete."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    put(
        folder / SAVED_FILE,
        {name: files[name].stat().st_size for name in sorted(files) if name not in (SAVED_FILE, RUN_RECORD)},
    )


def lacking(folder: Path) -> list[str]:
    """What a checkpoint has lost since it was saved; nothing is known of those that older versions saved."""
    if not folder.is_dir():
        return ["the folder is missing"]
    if not (folder / SAVED_FILE).is_file():
        return []
    try:
        sizes = dict(json_of((folder / SAVED_FILE).read_bytes()))
    except (OSError, TypeError, ValueError):
        return [f"{SAVED_FILE} is damaged"]
    return [each for name, size in sizes.items() if (each := _lost(folder / name, name, size))]


def _lost(file: Path, name: str, size: int) -> str:
    """What is wrong with a file; nothing if it is whole."""
    if not file.is_file():
        return f"{name} is missing"
    found = file.stat().st_size
    return (
        f"{name} has {found:,} bytes and not {size:,}"
        if found != size and file.suffix not in TEXT_SUFFIXES
        else ""
    )
